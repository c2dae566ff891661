"""Where a bound on the source is kept: nothing runs that was not measured, however it is reached.

The interpreter tells a hook that cannot be taken away of every compilation and execution. Only imports and
those modules of the standard library that write functions of their own (dataclasses, named tuples) may ask.
"""

from __future__ import annotations

import os
import re
import sys
import types
from typing import Any

_RUNNING = """
os.system os.exec os.posix_spawn pty.spawn subprocess.Popen sqlite3.connect ctypes.dlsym ctypes.dlsym/handle
ctypes.call_function cpython.PyInterpreterState_New code.__new__ function.__new__ marshal.loads marshal.load
pickle.find_class exec compile
"""
RUNNING = frozenset(_RUNNING.split())
ANYWHERE = frozenset(("code.__new__", "function.__new__", "marshal.loads", "pickle.find_class"))
"""what the standard library does for plain purposes"""
WRITERS = frozenset(("dataclasses.py", "collections/__init__.py", "typing.py", "ast.py"))
LIBRARY = os.path.dirname(os.__file__) + "/"
_ANNOTATION = re.compile(r"[^()\\]*")
"""nothing is called in an annotation that is read"""


class HiddenCode(BaseException):
    """Something was to be run that was not measured."""


def watch(root: str, files: dict[str, str], forbidden: list[str]) -> list[str]:
    """Refuse from now on; the list that is returned tells what was refused."""
    refused: list[str] = []
    measured = {os.path.join(root, name): text for name, text in files.items()}
    runs = frozenset(forbidden)
    frame_of, exists = sys._getframe, os.path.exists
    sys.dont_write_bytecode = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in RUNNING:
            fair = _fair(event, args, frame_of(1), measured)
        elif event == "import":
            ours = frame_of(1).f_code.co_filename.startswith(root)
            fair = not (ours and str(args[0]).partition(".")[0] in runs)
        elif event == "object.__setattr__":
            fair = args[1] != "__code__" or frame_of(1).f_code.co_filename.startswith(LIBRARY)
        elif event == "open":
            path = str(args[0])
            fair = not (path.startswith(root) and path.endswith(".pyc") and exists(path))
        else:
            return
        if not fair:
            refused.append(event)
            raise HiddenCode(event)

    sys.addaudithook(hook)
    return refused


def _fair(event: str, args: tuple[Any, ...], frame: types.FrameType, measured: dict[str, str]) -> bool:
    caller = frame.f_code.co_filename
    imports = caller.startswith("<frozen ")
    if not imports and not caller.startswith(LIBRARY):
        return False
    if event in ANYWHERE:
        return True
    if imports:
        return event == "exec" or (event == "compile" and _is_measured(args, measured))
    if caller.removeprefix(LIBRARY) not in WRITERS:
        return False
    if event == "exec":
        return True
    text = args[0] if isinstance(args[0], bytes) else b""
    if caller.endswith("typing.py"):
        plain = _ANNOTATION.fullmatch(text.decode("utf-8", "replace"))
        return plain is not None and not re.search(r"\b(lambda|for|if|await|yield)\b", plain[0])
    return not caller.endswith("dataclasses.py") or _named_plainly(frame)


def _is_measured(args: tuple[Any, ...], measured: dict[str, str]) -> bool:
    """A file that is imported: the library's own, or one of those that were measured, as it was."""
    source, path = args[0], os.fsdecode(args[1])
    if path in measured:
        return bytes(source) == measured[path].encode("utf-8", "surrogateescape")
    return path.startswith((LIBRARY, "<frozen ")) or "/site-packages/" in path


def _named_plainly(frame: types.FrameType | None) -> bool:
    """Whether the fields of the class, whose names become part of a text, are names."""
    while frame is not None and frame.f_code.co_filename.endswith("dataclasses.py"):
        fields = getattr(frame.f_locals.get("cls"), "__annotations__", {})
        if not all(type(name) is str and name.isidentifier() for name in fields):
            return False
        frame = frame.f_back
    return True
