"""The tool `apply_patch`: adds, deletes, updates and moves files by one patch, all of it or nothing."""

from __future__ import annotations

import json

from nano_coder.tools.patch import FilePatch, PatchError, patched, read_patch
from nano_coder.tools.text_files import TextFile, read_text
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

# Runs inside the jail: everything is written beside its place first, and moved there at the end.
_PROGRAM = """
import json, os, secrets, stat, sys

order = json.load(sys.stdin)
mark = ".nano-apply-" + secrets.token_hex(6)
staged, made, moved = [], [], []


def look(path):
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        part = "/".join(parts[:depth])
        try:
            mode = os.lstat(part).st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            sys.exit(f"{part} is a link; patch what it leads to, by its own path")
        if depth < len(parts) and not stat.S_ISDIR(mode):
            sys.exit(f"{part} is no directory")
    if not stat.S_ISREG(mode):
        sys.exit(f"{path} is a directory" if stat.S_ISDIR(mode) else f"{path} is no regular file")
    return mode


def stage(path, text, like):
    folder = os.path.dirname(path)
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for folder in reversed(missing):
        os.mkdir(folder)
        made.append(folder)
    new = os.path.join(os.path.dirname(path), f"{mark}-{len(staged)}")
    staged.append((new, path))
    with open(new, "wb") as file:
        file.write(text.encode("latin-1"))
    if like is not None:
        os.chmod(new, like & 0o777)


def move(source, target):
    os.replace(source, target)
    moved.append((source, target))


def undo():
    for source, target in reversed(moved):
        os.replace(target, source)
    for new, _ in staged:
        if os.path.lexists(new):
            os.unlink(new)
    for folder in reversed(made):
        os.rmdir(folder)


modes = {path: look(path) for path in [*order["write"], *order["delete"]]}
try:
    for path, (text, source) in order["write"].items():
        stage(path, text, modes[path] if modes.get(source) is None else modes[source])
    for new, path in staged:
        if modes[path] is not None:
            move(path, new + "-old")
        move(new, path)
    for number, path in enumerate(order["delete"]):
        move(path, os.path.join(os.path.dirname(path), f"{mark}-gone-{number}"))
except OSError as problem:
    undo()
    sys.exit(f"{problem.filename2 or problem.filename}: {problem.strerror}")
for _, target in moved:
    if os.path.basename(target).startswith(mark):
        os.unlink(target)
"""


@tool(body="patch", mutates=True)
def apply_patch(context: ToolContext, patch: str) -> ToolResult:
    """Change files by a patch: "*** Begin Patch", then for each file "*** Add File: PATH" with lines that
    begin with +, "*** Delete File: PATH", or "*** Update File: PATH" (then "*** Move to: PATH" to rename it)
    with hunks, and "*** End Patch". A hunk is "@@", or "@@ LINE" with a line above it such as a def or class,
    and then lines that begin with a blank (they stay), - (they go) or + (they come), three that stay around
    each change; "*** End of File" below it says that they are the last. Paths are relative. If one hunk does
    not fit, nothing is changed."""
    try:
        changes = read_patch(patch)
        order = _Order(context)
        for change in changes:
            order.take(change)
    except PatchError as problem:
        raise ToolFailure(f"{problem}. Nothing was changed.") from None
    order.carry_out()
    said = [f"{kind} {path}" for path, kind in order.kinds.items()]
    notes = [f"matched by overlooking {name}" for name in order.overlooked]
    return ToolResult(text="\n".join([*said, *notes]), repairs=tuple(order.overlooked))


class _Order:
    """The files as the patch leaves them, each change upon those before it."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._texts: dict[str, TextFile | None] = {}
        """None: deleted"""
        self._sources: dict[str, str] = {}
        """path -> the file whose permissions it gets"""
        self.kinds: dict[str, str] = {}
        """path -> A, M or D"""
        self.overlooked: list[str] = []

    def take(self, change: FilePatch) -> None:
        path = _inside(change.path)
        match change.kind:
            case "Add":
                self._put(path, TextFile(change.text), "A" if path not in self._texts else "M")
            case "Delete":
                self._read(path)
                self._put(path, None, "D")
            case _:
                file = self._read(path)
                text, seen = patched(path, file.text, change.hunks)
                self.overlooked += [name for name in seen if name not in self.overlooked]
                target = path if change.move_to is None else _inside(change.move_to)
                if target != path:
                    self._put(path, None, "D")
                    self._sources[target] = path
                self._put(target, file.edited(text), "M" if target == path else "A")

    def carry_out(self) -> None:
        """Write all files, or none. Raises ToolFailure."""
        # JSON holds text: a byte is the letter of its number
        write = {
            path: (file.data(path).decode("latin-1"), self._sources.get(path, path))
            for path, file in self._texts.items()
            if file is not None
        }
        # what was added and deleted by the same patch was never there
        deleted = [p for p, text in self._texts.items() if text is None and self._exists(p)]
        data = json.dumps({"write": write, "delete": deleted}).encode()
        execution = self._context.run_python(_PROGRAM, isolated=True, stdin=data)
        if execution.exit_code != 0:
            lines = execution.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
            raise ToolFailure(f"{lines[-1] if lines else 'the patch was cut off'}. Nothing was changed.")

    def _put(self, path: str, text: TextFile | None, kind: str) -> None:
        self._texts[path] = text
        self.kinds[path] = kind

    def _read(self, path: str) -> TextFile:
        if path in self._texts:
            text = self._texts[path]
            if text is None:
                raise PatchError(f"{path} was deleted or moved by this patch")
            return text
        try:
            return read_text(self._context.jail, path)
        except ToolFailure as problem:
            raise PatchError(str(problem)) from None

    def _exists(self, path: str) -> bool:
        try:
            self._context.jail.read(path)
        except OSError:
            return False
        return True


def _inside(path: str) -> str:
    """The path without `./`. Raises PatchError for one that no patch may touch."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts or "\0" in path or path.endswith("/"):
        raise PatchError(f"{path!r}: paths are relative to the workspace, and stay in it")
    if ".git" in parts:
        raise PatchError(f"{path!r}: what lies in .git is changed by git alone")
    return "/".join(parts)
