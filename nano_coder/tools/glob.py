"""The tool `glob`: lists files by a pattern of names."""

from __future__ import annotations

from nano_coder.tools.file_listing import LISTING
from nano_coder.tools.read import said_by
from nano_coder.tools.tool import ToolContext, ToolResult, tool

MOST_FILES = 300
_PROGRAM = (
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
    return said_by(context, _PROGRAM, ["rg", pattern, path, str(MOST_FILES)])
