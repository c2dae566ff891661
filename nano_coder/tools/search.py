"""The tool `search`: finds lines that match a regular expression, in one file or a tree."""

from __future__ import annotations

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

# Runs inside the jail, so that no path of the workspace is opened on the host.
_PROGRAM = r"""
import os, re, sys
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
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if pattern.search(line):
                    print(f"{path}:{number}:{line.rstrip()}")
    except (UnicodeDecodeError, OSError):
        continue
"""


@tool()
def search(context: ToolContext, pattern: str, path: str = ".") -> ToolResult:
    """Show the lines that match a regular expression, as path:line:text."""
    execution = context.run_python(_PROGRAM, [pattern, path], isolated=True)
    if execution.exit_code != 0:
        lines = execution.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        raise ToolFailure(lines[-1] if lines else "the search did not finish")
    text = execution.stdout.decode("utf-8", "backslashreplace").rstrip("\n")
    return ToolResult(text=text or "[no match]", execution=execution)
