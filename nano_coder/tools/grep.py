"""The tools `grep`, `glob` and `search`: find lines and files of the workspace, inside the jail.

`grep` and `glob` leave out what .gitignore files leave out. They use ripgrep where the jail has it, else a
walk of our own with Python's regular expressions.
"""

from __future__ import annotations

from dataclasses import replace

from nano_coder.tools.text_files import DECODING, said_by
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

LISTING = r"""
import os, re, shutil, subprocess, sys

OURS = (".git", ".nano", "__pycache__")


def pattern(glob):
    # a pattern of .gitignore as a regular expression on a path below its folder
    anchored, out, at = "/" in glob.rstrip("/"), "", 0
    glob = glob.strip("/") if glob.strip("/") else glob
    while at < len(glob):
        rest = glob[at:]
        if rest.startswith("**/") and (at == 0 or glob[at - 1] == "/"):
            out, at = out + "(?:.*/)?", at + 3
        elif rest == "**" and at and glob[at - 1] == "/":
            out, at = out + ".+", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        elif rest[0] == "[" and (end := rest.find("]", 2 + (rest[1:2] in ("!", "^")))) > 0:
            inner = rest[1:end].replace("\\", "\\\\").replace("[", "\\[")
            inner = "^/" + inner[1:] if inner[:1] in ("!", "^") else inner
            out, at = out + f"[{inner}]", at + end + 1
        else:
            out, at = out + re.escape(rest[0]), at + 1
    return re.compile(("" if anchored else "(?:.*/)?") + out, re.DOTALL)


def alternatives(glob):
    found = re.search(r"\{([^{}]*)\}", glob)
    if not found:
        return [glob]
    before, after = glob[: found.start()], glob[found.end() :]
    return [one for part in found[1].split(",") for one in alternatives(before + part + after)]


def rules(folder):
    try:
        # git matches bytes: `?` is one of them
        with open(os.path.join(folder, ".gitignore"), encoding="latin-1", newline="") as file:
            lines = [line.removesuffix("\r") for line in file.read().split("\n")]
    except OSError:
        return []
    found = []
    for line in lines:
        line = re.sub(r"(?<!\\) +$", "", line)
        if not line or line.startswith("#"):
            continue
        back = line.startswith("!")
        line = line[back:]
        try:
            found.append((folder, pattern(line), line.endswith("/"), back))
        except re.error:
            continue
    return found


def ignored(path, is_folder, known):
    for folder, wanted, folders_only, back in reversed(known):
        below = os.fsencode(path if folder == "." else path[len(folder) + 1 :]).decode("latin-1")
        if (is_folder or not folders_only) and wanted.fullmatch(below):
            return not back
    return False


def walk(folder, known):
    known = known + rules(folder)
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = os.path.normpath(os.path.join(folder, entry.name))
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in OURS or ignored(path, is_folder, known):
            continue
        if is_folder:
            yield from walk(path, known)
        elif entry.is_file(follow_symlinks=False):
            yield path


def above(folder):
    # the rules of the workspace's folders above one
    found = []
    if os.path.isabs(folder) or folder.startswith(".."):
        return found
    parts = [] if folder == "." else folder.split("/")
    for depth in range(len(parts)):
        found += rules("/".join(parts[:depth]) or ".")
    return found


def ripgrep():
    return shutil.which("rg") if order_by == "rg" else None


def rg(*options):
    usual = ["rg", "--no-config", "--hidden", "--no-require-git", "--color=never", "--sort=path"]
    return [*usual, *(f"--glob=!{name}" for name in OURS), *options]


def files(root):
    if os.path.isfile(root):
        return [root]
    if not os.path.isdir(root):
        sys.exit(f"no such file or directory: {root}")
    root = os.path.normpath(root)
    if not ripgrep():
        return list(walk(root, above(root)))
    done = subprocess.run(rg("--files", "--", root), capture_output=True)
    return [os.path.normpath(os.fsdecode(line)) for line in done.stdout.splitlines()]


def chosen(paths, root, glob):
    if not glob:
        return paths
    wanted = [pattern(one) for one in alternatives(glob)]
    return [p for p in paths if any(w.fullmatch(os.path.relpath(p, root)) for w in wanted)]


def show(lines, most, what):
    for line in lines[:most]:
        print(os.fsencode(line).decode("utf-8", "backslashreplace"))
    if len(lines) > most:
        print(f"[the first {most} of {len(lines)} {what}]")
    if not lines:
        print(f"[no {what}]")


order_by = sys.argv.pop(1)
"""
"""functions for a program whose first argument is `rg`, to use ripgrep if it is there, or `own`"""


MOST_FILES = 300
_GLOB = (
    LISTING
    + r"""
glob, root, most = sys.argv[1:]
root = root if os.path.isdir(root) else sys.exit(f"no such directory: {root}")
show(chosen(files(root), root, glob), int(most), "files")
"""
)


@tool()
def glob(context: ToolContext, pattern: str = "*", path: str = ".") -> ToolResult:
    """List the files below a directory whose name or path matches a pattern, as *.py, src/**/*.ts or
    *.{yml,yaml}; what .gitignore leaves out is left out."""
    return said_by(context, _GLOB, ["rg", pattern, path, str(MOST_FILES)])


MOST_LINES, WIDTH = 200, 300
_GREP = (
    DECODING
    + LISTING
    + r"""
wanted, root, glob, ignore_case, around, most, width = sys.argv[1:]
ignore_case, around, most, width = ignore_case == "1", int(around), int(most), int(width)
what = "lines; a narrower pattern, path or glob shows the rest" if around else "matching lines"


def cut(line):
    return line if len(line) <= width else f"{line[:width]} [and {len(line) - width} more characters]"


def by_ripgrep(paths):
    options = ["--line-number", "--no-heading", "--with-filename", f"--context={around}", "--no-ignore"]
    if ignore_case:
        options.append("--ignore-case")
    lines, size = [], 500
    for start in range(0, len(paths), size):
        argv = rg(*options, "-e", wanted, "--", *paths[start : start + size])
        done = subprocess.run(argv, capture_output=True)
        if done.returncode == 2 and not done.stdout:
            said = os.fsdecode(done.stderr).strip().splitlines()
            sys.exit(f"{wanted!r} is no regular expression: {said[-1] if said else ''}")
        lines += [cut(line.decode(*encoding_of(line))) for line in done.stdout.split(b"\n")[:-1]]
    return lines


def by_ourselves(paths):
    try:
        expression = re.compile(wanted, re.IGNORECASE if ignore_case else 0)
    except re.error as problem:
        sys.exit(f"{wanted!r} is no regular expression: {problem}")
    lines = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            continue
        if b"\0" in data:
            continue
        text = data.decode(encoding_of(data)[0], "backslashreplace").split("\n")
        text = text[:-1] if text[-1] == "" else text
        hits = {n for n, line in enumerate(text) if expression.search(line.removesuffix("\r"))}
        near = sorted({m for n in hits for m in range(max(0, n - around), min(len(text), n + around + 1))})
        for place, n in enumerate(near):
            if around and lines and (not place or near[place - 1] != n - 1):
                lines.append("--")
            sign = ":" if n in hits else "-"
            lines.append(cut(f"{path}{sign}{n + 1}{sign}{text[n]}"))
    return lines


paths = chosen(files(root), root if os.path.isdir(root) else ".", glob)
show(by_ripgrep(paths) if ripgrep() else by_ourselves(paths), most, what)
"""
)


@tool()
def grep(
    context: ToolContext,
    pattern: str,
    path: str = ".",
    glob: str | None = None,
    ignore_case: bool = False,
    around: int = 0,
) -> ToolResult:
    """Show the lines that match a regular expression, as path:number:line, in a file or all files below a
    directory that .gitignore does not leave out; glob, as *.py, chooses files by name, and around shows so
    many lines before and after each."""
    if not 0 <= around <= 20:
        raise ToolFailure("around is 0 to 20 lines")
    given = (pattern, path, glob or "", str(int(ignore_case)), str(around), str(MOST_LINES), str(WIDTH))
    return said_by(context, _GREP, ["rg", *given])


# Runs inside the jail, so that no path of the workspace is opened on the host.
_SEARCH = (
    DECODING
    + r"""
import io, os, re, sys
pattern, root = re.compile(sys.argv[1]), sys.argv[2]
if not os.path.exists(root):
    sys.exit(f"no such file: {root}")
def files():
    if os.path.isfile(root):
        yield root
    for folder, names, leaves in os.walk(root):
        names[:] = sorted(n for n in names if not n.startswith(".") and n != "__pycache__")
        for leaf in sorted(leaves):
            yield os.path.normpath(os.path.join(folder, leaf))
for path in files():
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        continue
    if b"\0" in data:
        continue
    lines = io.TextIOWrapper(io.BytesIO(data), encoding=encoding_of(data)[0], errors="backslashreplace")
    for number, line in enumerate(lines, 1):
        if pattern.search(line):
            print(f"{path}:{number}:{line.rstrip()}")
"""
)


@tool()
def search(context: ToolContext, pattern: str, path: str = ".") -> ToolResult:
    """Show the lines that match a regular expression, as path:line:text."""
    found = said_by(context, _SEARCH, [pattern, path])
    return found if found.text else replace(found, text="[no match]")
