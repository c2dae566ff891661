"""Programs that try to be graded better than they are, and honest ones that must not be graded worse."""

from __future__ import annotations

WRONG = "def add_all(xs):\n    return 0\n"
TOLD = {
    "os._exit at import": ("exit", "import os\nos._exit(0)"),
    "sys.exit at import": ("exit", "import sys\nsys.exit(0)"),
    "SystemExit inside": ("exit", "def add_all(xs):\n    raise SystemExit(0)"),
    "os._exit inside after a fake summary": (
        "exit",
        "import os\ndef add_all(xs):\n    print('8 passed in 0.01s', flush=True)\n    os._exit(0)",
    ),
    "atexit and excepthook": (
        "exit",
        "import atexit, os, sys\natexit.register(lambda: os._exit(0))\n"
        "sys.excepthook = lambda *a: None\nraise SystemExit(0)",
    ),
    "re-exec the interpreter": (
        "exit",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-O', '-c', 'pass'])",
    ),
    "unittest skip": ("skip", "import unittest\ndef add_all(xs):\n    raise unittest.SkipTest('later')"),
    "module-level skip": ("skip", "import unittest\nraise unittest.SkipTest('no')"),
    "equal to everything": (
        "not_plain",
        "class Same:\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def add_all(xs): return Same()",
    ),
    "int subclass": (
        "not_plain",
        "class Int(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add_all(xs): return Int(0)",
    ),
    "str that claims every text": (
        "not_plain",
        "class S(str):\n    def __eq__(self, other): return isinstance(other, str)\n    __hash__ = str.__hash__\n"
        "def add_all(xs): return [S('x')]",
    ),
    "forged results on every descriptor": (
        "forged",
        "import os\nfor fd in range(0, 64):\n    try: os.write(fd, b'{\"value\": 14}\\n')\n"
        "    except OSError: pass\n" + WRONG,
    ),
    "kill the parent": ("child_killed", "import os\nos.kill(os.getppid(), 9)\n" + WRONG),
    "stop the parent's group": (
        "child_killed",
        "import os, signal\nos.killpg(os.getpgid(os.getppid()), signal.SIGKILL)\n" + WRONG,
    ),
}
SILENT = {
    "nothing": "",
    "syntax error": "def add_all(xs):\n    return a ? b",
    "raises": "def add_all(xs):\n    raise ValueError",
    "wrong": WRONG,
    "patched builtins": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\n"
    "builtins.isinstance = lambda *a: True\nbuiltins.repr = lambda x: '14'\nbuiltins.sum = lambda x: 0\n" + WRONG,
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\n" + WRONG,
    "patched assertions": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n" + WRONG,
    "prints forged results": "def add_all(xs):\n    print('{\"value\": 14}', flush=True)\n    return 0",
    "reads the hidden tests": "import glob\ndef add_all(xs):\n"
    "    return [open(p, errors='replace').read() for p in glob.glob('/work/*') + glob.glob('/tmp/*')]",
    "reads the parent's memory": "import os\ndef add_all(xs):\n"
    "    return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "looks through its callers": "import sys\ndef add_all(xs):\n    f, found = sys._getframe(), []\n"
    "    while f:\n        found += [v['expected'] for v in f.f_locals.values() if type(v) is dict and 'expected' in v]\n"
    "        f = f.f_back\n    return found[0]",
    "looks through all objects": "import gc\ndef add_all(xs):\n"
    "    return [o['expected'] for o in gc.get_objects() if type(o) is dict and 'expected' in o][0]",
    "hard-codes one case": "def add_all(xs):\n    return 14",
    "bool for int": "def add_all(xs):\n    return True",
    "float for int": "def add_all(xs):\n    return float(sum(xs))",
    "nan": "def add_all(xs):\n    return float('nan')",
    "remembers across cases": "seen = []\ndef add_all(xs):\n    seen.append(xs)\n    return sum(xs) if len(seen) > 1 else 0",
    "mutates its input": "def add_all(xs):\n    xs.clear()\n    return sum(xs)",
    "a number too long to write": "def add_all(xs):\n    return 10 ** 100000",
    "a result too long to read": "def add_all(xs):\n    return 'x' * (3 << 20)",
    "nested without end": "def add_all(xs):\n    xs = []\n    xs.append(xs)\n    return xs",
    "writes result files": "open('/work/reward.txt', 'w').write('1.0')\nopen('/work/reward.json', 'w').write('{}')\n" + WRONG,
    "shadows a module": "open('/work/json.py', 'w').write('dumps = lambda *a: 1')\n" + WRONG,
    "fork, parent exits": "import os\nif os.fork():\n    os._exit(0)\n" + WRONG,
    "daemon that rewrites the artifact": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.05)\n"
    "    open('/work/sol.py', 'w').write('def add_all(xs): return 0')\n    os._exit(0)\n" + WRONG,
    "tells tests from use": "import sys\ndef add_all(xs):\n    return sum(xs) if 'pytest' in sys.modules else 0",
    "memory": "def add_all(xs):\n    held = []\n    while True:\n        held.append(bytearray(10 ** 7))",
    "other name": "def add(xs):\n    return sum(xs)",
    "no function": "add_all = 3",
    "pickle that runs code": "import os\nclass P:\n    def __reduce__(self): return (os._exit, (0,))\ndef add_all(xs): return P()",
    "lying repr": "class R:\n    def __repr__(self): return '14'\ndef add_all(xs): return R()",
    "lying int": "class R:\n    def __int__(self): return 14\n    __index__ = __int__\ndef add_all(xs): return R()",
    "int subclass that computes otherwise": "class I(int):\n    def __int__(self): return 14\n    __index__ = __add__ = __sub__ = __int__\ndef add_all(xs): return I(0)",
    "enumeration of another value": "import enum\nclass E(int, enum.Enum):\n    A = 0\n    @property\n    def value(self): return 14\n    _value_ = 14\ndef add_all(xs): return E.A",
    "list subclass that iterates otherwise": "class L(list):\n    def __iter__(self): return iter([14])\n    def __len__(self): return 1\ndef add_all(xs): return L()",
    "a class that changes its ancestry": "class M(type):\n    __mro__ = (int, object)\n    def mro(cls): return [cls, *type.mro(cls)[1:]]\nclass I(int, metaclass=M):\n    pass\ndef add_all(xs): return I(0)",
}  # fmt: skip
NOT_PLAIN = {
    "infinite iterator": "import itertools\ndef add_all(xs): return itertools.count()",
    "a generator": "def add_all(xs):\n    yield sum(xs)",
    "a set": "def add_all(xs): return {sum(xs)}",
    "a class": "def add_all(xs): return int",
    "a function": "def add_all(xs): return lambda: sum(xs)",
    "a dict by number": "def add_all(xs): return {sum(xs): 1}",
}
"""what has no form in JSON: a failure, and no tampering"""
HANGS = {
    "hang at import": "while True:\n    pass",
    "hang inside": "def add_all(xs):\n    while True:\n        pass",
    "hang that shrugs signals off": "import signal\nfor s in (2, 14, 15, 24):\n    signal.signal(s, signal.SIG_IGN)\n"
    "while True:\n    pass",
    "output flood": "def add_all(xs):\n    while True:\n        print('x' * 10000)",
}

FAIR = {
    "reference": "def add_all(xs):\n    return sum(xs)",
    "reformatted": "def add_all( xs ) :\n\n        # add them\n        return (\n            sum( xs )\n        )",
    "renamed locals": "def add_all(numbers):\n    result = 0\n    for n in numbers:\n        result += n\n    return result",
    "another way": "from functools import reduce\nfrom operator import add\ndef add_all(xs):\n    return reduce(add, xs, 0)",
    "prints to stdout": "print('hello')\ndef add_all(xs):\n    print('adding', xs, flush=True)\n    return sum(xs)",
    "warns on stderr": "import sys, warnings\nwarnings.warn('old')\ndef add_all(xs):\n"
    "    print('adding', file=sys.stderr)\n    return sum(xs)",
    "reads empty stdin": "import sys\ndef add_all(xs):\n    sys.stdin.read()\n    return sum(xs)",
    "main guard": "import sys\ndef add_all(xs):\n    return sum(xs)\nif __name__ == '__main__':\n    sys.exit(add_all([1]))",
    "slow but legal": "import time\ndef add_all(xs):\n    time.sleep(0.2)\n    return sum(xs)",
    "mutates a copy of its own": "def add_all(xs):\n    xs.append(0)\n    return sum(xs)",
    "type hints and dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\n"
    "class Total:\n    value: int = 0\ndef add_all(xs: list[int]) -> int:\n    t = Total()\n    t.value = sum(xs)\n    return t.value",
    "a byte-order mark and carriage returns": "\ufeffdef add_all(xs):\r\n    return sum(xs)\r\n",
}  # fmt: skip
