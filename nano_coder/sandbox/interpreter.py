"""The jail's Python interpreter: what must be mounted so that an interpreter of the host runs in a jail.

Found by looking at files only: the interpreter may belong to an untrusted repository, so the host never runs
it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nano_shared.durable import NotReadable, read_regular
from nano_shared.errors import SandboxError

HIDDEN_BY_JAIL = ("/work", "/tmp", "/proc", "/dev", "/sys", "/etc")
"""paths that the jail provides itself: an interpreter below one of them cannot keep its path"""

_RELOCATED = "/opt/venv"
_SHIMS = "/opt/bin"
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_PARTS = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
"""folders of an installation prefix; not the whole of it, which may be somebody's ~/.local"""
_LONGEST_CHAIN = 16
_LONGEST_CONFIG = 1 << 16
_WORKSPACE = "/work"


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: str
    """inside the jail"""
    search_path: str
    """PATH inside the jail; its `python` is this interpreter"""
    binds: tuple[tuple[str, str], ...]
    """(source on the host, target inside), read-only"""
    links: tuple[tuple[str, str], ...]
    """(target, path) of symlinks"""
    shims: tuple[tuple[str, str, int], ...]
    """(path, text, mode) of small programs for names that do not exist"""


def find_interpreter(python: str) -> Interpreter:
    """What to mount for `python`, a path on the host.

    Raises SandboxError if it does not exist, is no CPython installation, or cannot keep its path.
    """
    program = Path(os.path.abspath(python))
    if not os.access(program, os.X_OK):
        raise SandboxError(f"no interpreter at {python!r}; name an executable Python with --python")
    prefix = program.parent.parent
    home = _venv_home(prefix)
    mounts = _Mounts()
    if home is None:
        program = program.resolve()
        mounts.add_installation(program.parent.parent)
        return _described(program, str(program), mounts)
    mounts.add_installation(home.parent)
    mounts.add_installation(home.resolve().parent)
    mounts.add_chain(program, prefix)
    target = _RELOCATED if _under(prefix, HIDDEN_BY_JAIL) else str(prefix)
    mounts.add_parts(prefix, target)
    if target == str(prefix) and prefix != Path(sys.prefix):
        for path in _editable(prefix):
            mounts.links[path] = f"{_WORKSPACE}/{os.path.basename(path)}"
    return _described(program, f"{target}/bin/{program.name}", mounts)


def _described(program: Path, path: str, mounts: _Mounts) -> Interpreter:
    shims = []
    for name in ("python", "python3"):
        beside = program.parent / name
        if not beside.exists() or beside.resolve() != program.resolve():
            shims.append((f"{_SHIMS}/{name}", f'#!/bin/sh\nexec {path} "$@"\n', 0o755))
    if path != str(program) and (program.parent / "pytest").exists():
        # its shebang line names the path on the host
        shims.append((f"{_SHIMS}/pytest", f'#!/bin/sh\nexec {path} -m pytest "$@"\n', 0o755))
    folders = [_SHIMS] if shims else []
    folders += [os.path.dirname(path), *_SYSTEM_PATH.split(":")]
    return Interpreter(
        path=path,
        search_path=":".join(dict.fromkeys(folders)),
        binds=tuple((source, target) for target, source in mounts.binds.items()),
        links=tuple((link, at) for at, link in mounts.links.items()),
        shims=tuple(shims),
    )


class _Mounts:
    """Bind mounts and symlinks, by their path inside the jail."""

    def __init__(self) -> None:
        self.binds: dict[str, str] = {}
        self.links: dict[str, str] = {}

    def add_installation(self, prefix: Path) -> None:
        """Add a base installation at its own path. Raises SandboxError for what only looks like one."""
        if _under(prefix, ("/usr",)):
            return
        if not _is_installation(prefix):
            raise SandboxError(f"{str(prefix)!r} holds no Python installation (lib/python3*/os.py)")
        if _under(prefix, HIDDEN_BY_JAIL):
            raise SandboxError(
                f"the Python installation {str(prefix)!r} lies where the jail has its own files; "
                f"choose one outside {', '.join(HIDDEN_BY_JAIL)} with --python"
            )
        self.add_parts(prefix, str(prefix))

    def add_chain(self, program: Path, prefix: Path) -> None:
        """Add the chain of symlinks from a virtual environment's interpreter to its target."""
        hop = program
        for _ in range(_LONGEST_CHAIN):
            if not _under(hop, (str(prefix), "/usr")):
                if _is_installation(hop.parent.parent):
                    self.add_installation(hop.parent.parent)
                elif hop.is_symlink() and not _under(hop, HIDDEN_BY_JAIL):
                    self.links[str(hop)] = os.readlink(hop)
            if not hop.is_symlink():
                return
            hop = Path(os.path.normpath(hop.parent / os.readlink(hop)))
        raise SandboxError(f"too many symlinks behind the interpreter {str(program)!r}")

    def add_parts(self, prefix: Path, target: str) -> None:
        for name in _PARTS:
            source = prefix / name
            if source.is_symlink():
                # lib64 -> lib is the only link that occurs; another could mount any folder of the host
                if (link := os.readlink(source)) in _PARTS:
                    self.links[f"{target}/{name}"] = link
            elif source.exists():
                self.binds[f"{target}/{name}"] = os.path.realpath(source)


def _editable(prefix: Path) -> Iterator[str]:
    """Entries of the project that an editable install in a virtual environment imports from.

    In the jail the project is mounted as the workspace; its path on the host, as .pth files and setuptools'
    finders name it, must lead there.
    """
    for project in {prefix.parent, prefix.parent.resolve()}:
        if _under(project, HIDDEN_BY_JAIL):
            continue
        named = re.compile(re.escape(f"{project}") + r"(?:/+([^/'\"\n\r]*))?(?=[/'\"\n\r]|\Z)")
        names = {name for text in _import_hooks(prefix) for name in named.findall(text)}
        if "" in names:  # the project itself
            names = set(os.listdir(project))
        yield from (f"{project}/{name}" for name in sorted(names - {prefix.name, ".", "..", ""}))


def _import_hooks(prefix: Path) -> Iterator[str]:
    for pattern in ("*.pth", "__editable__*.py"):
        for file in prefix.glob(f"lib/python3*/site-packages/{pattern}"):
            with suppress(OSError, NotReadable):
                yield read_regular(file, _LONGEST_CONFIG).decode(errors="replace")


def _is_installation(prefix: Path) -> bool:
    return any(prefix.glob("lib/python3*/os.py"))


def _under(path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _venv_home(prefix: Path) -> Path | None:
    """The `home` of a virtual environment: the folder of the interpreter that created it."""
    try:
        text = read_regular(prefix / "pyvenv.cfg", _LONGEST_CONFIG).decode(errors="replace")
    except OSError:
        return None
    except NotReadable as problem:
        raise SandboxError(f"cannot read {str(prefix / 'pyvenv.cfg')!r}: {problem}") from None
    for line in text.splitlines():
        key, _, value = line.partition("=")
        if key.strip().lower() == "home":
            home = Path(value.strip())
            if home.is_absolute():
                return home
    raise SandboxError(f"{str(prefix / 'pyvenv.cfg')!r} names no absolute home; make the environment anew")
