"""What a policy may make of its workspace, as Python that it runs there: what can be kept, and what cannot."""

from __future__ import annotations

LOST = {
    "sparse files": "for i in range(3): open(f's{i}', 'wb').truncate(250 << 20)",
    "one file with a large hole": "open('s', 'wb').truncate(255 << 20)\nimport os\nfor i in range(9): os.link('s', f's{i}')",
    "a tree 3,000 deep": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "a tree just too deep": "import os\nos.makedirs('/'.join('d' * 66))",
    "a path too long": "import os\nfor _ in range(17): os.mkdir('n' * 250); os.chdir('n' * 250)",
    "hard links to one file": "import os\nopen('g', 'wb').write(bytes(10 << 20))\nfor i in range(80): os.link('g', f'l{i}')",
}
KEPT = {
    "names of no encoding": "for n in (b'\\xff\\xfe', b'd\\x80.py', b'\\xed\\xa0\\x80'): open(n, 'w').write('x')",
    "names with newlines and escapes": "for n in ('a\\nb', '\\x1b[2J', '-rf', '\"q\"', ' ', 'a\\\\b', '\\u202e'): open(n, 'w')",
    "folders of no encoding": "import os\nos.makedirs(b'\\xfe/\\xff'); open(b'\\xfe/\\xff/a', 'w').write('x')",
    "links in circles": "import os\nos.symlink('a', 'b'); os.symlink('b', 'a'); os.symlink('.', 'me')",
    "links to no encoding and far": "import os\nos.symlink(b'\\xff', 'bad'); os.symlink('x' * 4000, 'far'); os.symlink('/', 'up')",
    "pipes and sockets": "import os, socket\nos.mkfifo('p'); socket.socket(socket.AF_UNIX).bind('sock')",
    "a pipe for the artifact": "import os\nos.remove('a.py'); os.mkfifo('a.py')",
    "a folder for the artifact": "import os\nos.remove('a.py'); os.makedirs('a.py/b')",
    "a link for the artifact": "import os\nos.remove('a.py'); os.symlink('/proc/self/mem', 'a.py')",
    "no artifact": "import os\nos.remove('a.py')",
    "an artifact of no encoding": "open('a.py', 'wb').write(bytes(range(128, 256)))",
    "an artifact of NUL": "open('a.py', 'wb').truncate(100 << 10)",
    "a large artifact": "open('a.py', 'wb').truncate(100 << 20)",
    "no permissions": "import os\nos.mkdir('d'); open('d/f', 'w'); os.chmod('d/f', 0); os.chmod('d', 0); os.chmod('a.py', 0)",
    "no permission for the workspace": "import os\nos.chmod('/work', 0)",
    "odd permissions": "import os\nos.chmod('a.py', 0o6777); os.mkdir('d'); os.chmod('d', 0o1777)",
    "our own folder taken": "import os\nos.mkdir('.nano'); os.chmod('.nano', 0)",
    "our own folder a link": "import os\nos.symlink('/tmp', '.nano')",
    "many files": "for i in range(15_000): open(f'f{i}', 'w')",
    "a full disk": "open('x', 'wb').write(b'q' * (300 << 20))",
}  # fmt: skip
