"""The tool `grep`: finds lines by a regular expression in the files of a workspace, by ripgrep if it can."""

from __future__ import annotations

from nano_coder.tools.file_listing import LISTING
from nano_coder.tools.read import said_by
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

MOST_LINES, WIDTH = 200, 300
_PROGRAM = (
    LISTING
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
        lines += [cut(os.fsdecode(line)) for line in done.stdout.split(b"\n")[:-1]]
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
        text = data.decode("utf-8", "backslashreplace").split("\n")
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
    return said_by(context, _PROGRAM, ["rg", *given])
