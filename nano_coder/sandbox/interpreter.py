"""The jail's Python interpreter: what must be mounted so that an interpreter of the host runs in a jail.

Found by looking at files only: the interpreter may belong to an untrusted repository, so the host never runs
it.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nano_shared.errors import SandboxError
from nano_shared.files import NotReadable, read_regular
from nano_shared.snapshot import DEFAULT_EXCLUDES

HIDDEN_BY_JAIL = ("/work", "/tmp", "/proc", "/dev", "/sys", "/etc")
"""paths that the jail provides itself: what lies below one of them cannot keep its place"""

_RELOCATED = "/opt/venv"
_SHIMS = "/opt/bin"
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_PARTS = ("bin", "lib", "lib64", "include", "pyvenv.cfg")
"""folders of an installation prefix; not the whole of it, which may be somebody's ~/.local"""
_SITES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
_HOOKS = (".pth", ".egg-link", ".py")
"""endings of the files there by which an editable install finds its project"""
_LONGEST_CHAIN = 16
_LONGEST_TEXT = 1 << 16
_MOST_ENTRIES = 2000
_WORKSPACE = "/work"
_USUAL_NAMES = (".venv", "venv", "env")
_SAID_PATH = re.compile(r"""['"](/[^'"\n]+)['"]""")


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
    files: tuple[tuple[str, str, int], ...]
    """(path, text, mode) of programs that do not exist, or name a place that is another in the jail"""
    covers: tuple[tuple[str, str], ...] = ()
    """(text, path) that takes the place of a file below a bind"""
    late: tuple[tuple[str, str], ...] = ()
    """(target, path) of symlinks below the folders that each jail has for itself"""
    shows_project: bool = False
    """whether it imports from the workspace by itself"""
    lacks: tuple[str, ...] = ()
    """sentences on what of it the jail does not show"""


def find_interpreter(python: str, project: Path | None = None) -> Interpreter:
    """What to mount for `python`, a path on the host.

    `project` is the directory whose copy is the workspace; None: the one around the environment. What its
    scripts and import hooks say of it leads to the workspace. Raises SandboxError if the interpreter does not
    exist or is no CPython installation.
    """
    program = Path(os.path.abspath(python))
    if not os.access(program, os.X_OK):
        raise SandboxError(f"no interpreter at {python!r}; name an executable Python with --python")
    prefix = program.parent.parent
    home = _venv_home(prefix)
    if home is None:
        program = program.resolve()
        prefix = program.parent.parent
    elif project is None and prefix != Path(sys.prefix) and prefix.name in _USUAL_NAMES:
        project = prefix.parent
    mounts = _Mounts(project)
    if home is None:
        mounts.add_installation(prefix)
    else:
        mounts.add_installation(home.parent)
        mounts.add_installation(home.resolve().parent)
        mounts.add_chain(program, prefix)
        if _under(prefix, HIDDEN_BY_JAIL):
            mounts.moves[str(prefix)] = _RELOCATED
        mounts.add_parts(prefix)
    mounts.add_hooks(prefix)
    mounts.show_places(prefix)
    return _described(program, mounts)


def _described(program: Path, mounts: _Mounts) -> Interpreter:
    path, shims = mounts.place(str(program)), []
    for name in ("python", "python3"):
        beside = program.parent / name
        if not beside.exists() or beside.resolve() != program.resolve():
            shims.append((f"{_SHIMS}/{name}", f'#!/bin/sh\nexec {path} "$@"\n', 0o755))
    folders = [_SHIMS] if shims else []
    folders += [os.path.dirname(path), *_SYSTEM_PATH.split(":")]
    return Interpreter(
        path=path,
        search_path=":".join(dict.fromkeys(folders)),
        binds=tuple((source, target) for target, source in mounts.binds.items()),
        links=tuple((link, at) for at, link in mounts.links.items()),
        files=(*mounts.files, *shims),
        covers=tuple(mounts.covers),
        late=tuple((link, at) for at, link in mounts.late.items()),
        shows_project=mounts.shows_project,
        lacks=tuple(mounts.lacks),
    )


class _Mounts:
    """Bind mounts, symlinks and files, by their path inside the jail."""

    def __init__(self, project: Path | None) -> None:
        self.binds: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.late: dict[str, str] = {}
        self.files: list[tuple[str, str, int]] = []
        self.covers: list[tuple[str, str]] = []
        self.lacks: list[str] = []
        self.moves: dict[str, str] = {}
        """place of an installation on the host -> its place in the jail, where that is another"""
        self.shows_project = False
        self._project = project.absolute() if project else None
        self._hidden_link = False

    def place(self, path: str) -> str:
        """Where a path of the host is in the jail."""
        for old, new in self.moves.items():
            if path == old or path.startswith(f"{old}/"):
                return new + path[len(old) :]
        return path

    def add_installation(self, prefix: Path) -> None:
        """Add a base installation. Raises SandboxError for what only looks like one."""
        if _under(prefix, ("/usr",)) or str(prefix) in self.moves:
            return
        if not _is_installation(prefix):
            raise SandboxError(f"{str(prefix)!r} holds no Python installation (lib/python3*/os.py)")
        if _under(prefix, HIDDEN_BY_JAIL):
            self.moves[str(prefix)] = f"/opt/python{len(self.moves)}"
        self.add_parts(prefix)

    def add_chain(self, program: Path, prefix: Path) -> None:
        """Add the chain of symlinks from a virtual environment's interpreter to its target."""
        hop = program
        for _ in range(_LONGEST_CHAIN):
            if not _under(hop, (str(prefix), "/usr")):
                if _is_installation(hop.parent.parent):
                    self.add_installation(hop.parent.parent)
                elif hop.is_symlink() and not _under(hop, HIDDEN_BY_JAIL):
                    self.links[str(hop)] = os.readlink(hop)
                else:
                    self._hidden_link = True
            if not hop.is_symlink():
                return
            hop = Path(os.path.normpath(hop.parent / os.readlink(hop)))
        raise SandboxError(f"too many symlinks behind the interpreter {str(program)!r}")

    def add_parts(self, prefix: Path) -> None:
        target = self.place(str(prefix))
        for name in _PARTS:
            source = prefix / name
            if source.is_symlink():
                # lib64 -> lib is the only link that occurs; another could mount any folder of the host
                if (link := os.readlink(source)) in _PARTS:
                    self.links[f"{target}/{name}"] = link
            elif name == "bin" and (self.moves or self._hidden_link) and source.is_dir():
                self._add_programs(source, target)
            elif name == "pyvenv.cfg" and (text := self._mended(source, self.moves)) is not None:
                self.files.append((f"{target}/{name}", text, 0o644))
            elif source.exists():
                self.binds[f"{target}/{name}"] = os.path.realpath(source)

    def _add_programs(self, source: Path, target: str) -> None:
        """Add a `bin` in which scripts and links say where a moved installation is."""
        beside = f"{target}/.bin"  # on the same level, for libraries that a program finds beside it
        self.binds[beside] = os.path.realpath(source)
        with os.scandir(source) as entries:
            listed = list(itertools.islice(entries, _MOST_ENTRIES))
        for entry in listed:
            at = f"{target}/bin/{entry.name}"
            if entry.is_symlink():
                link = os.path.normpath(source / os.readlink(entry.path))
                if link.startswith(f"{source}/"):
                    self.links[at] = os.path.relpath(link, source)
                else:
                    known = self.place(link) != link or not _under(Path(link), HIDDEN_BY_JAIL)
                    self.links[at] = self.place(link if known else os.path.realpath(link))
            elif (text := self._mended(Path(entry.path), self.moves)) is not None:
                self.files.append((at, text, entry.stat().st_mode & 0o755))
            else:
                self.links[at] = f"../.bin/{entry.name}"

    def _mended(self, file: Path, moves: dict[str, str]) -> str | None:
        """The text of a file with every moved place at its new one; None if it names none, or is no text."""
        if not moves or file.is_symlink():
            return None
        try:
            content = read_regular(file, _LONGEST_TEXT)
        except (OSError, NotReadable):
            return None
        text = content.decode("utf-8", "surrogateescape")
        places = "|".join(re.escape(old) for old in sorted(moves, key=len, reverse=True))
        mended = re.sub(rf"(?<![\w.-])(?:{places})(?![\w.+@-])", lambda found: moves[found[0]], text)
        return None if mended == text or "\0" in text else mended

    def add_hooks(self, prefix: Path) -> None:
        """Let import hooks find the workspace where they name the project, and a moved installation."""
        project = self._project
        own = {} if project is None else dict.fromkeys({str(project), str(project.resolve())}, _WORKSPACE)
        for folder in _site_folders(prefix):
            for file in itertools.islice(sorted(folder.iterdir()), _MOST_ENTRIES):
                if file.suffix not in _HOOKS or file.is_symlink():
                    continue
                text = self._mended(file, {**own, **self.moves, **_relative(file, own)})
                if text is not None:
                    self.covers.append((text, f"{self.place(str(folder))}/{file.name}"))
                    self.shows_project |= _names(text, _WORKSPACE)
                if prefix != Path(sys.prefix):
                    self._look_for_others(file, prefix)

    def _look_for_others(self, file: Path, prefix: Path) -> None:
        """Tell of what an import hook finds on the host, and the jail does not show."""
        if file.suffix == ".py" and not file.name.startswith("__editable__"):
            return
        try:
            text = read_regular(file, _LONGEST_TEXT).decode("utf-8", "replace")
        except (OSError, NotReadable):
            return
        said = _SAID_PATH.findall(text) if file.suffix == ".py" else text.splitlines()
        shown = (
            "/usr",
            str(prefix),
            *self.moves,
            *self.binds,
            *([str(self._project)] if self._project else []),
        )
        for path in dict.fromkeys(said):
            if path.startswith("/") and os.path.exists(path) and not _under(Path(path), shown):
                self.lacks.append(
                    f"{path}, from which {file.name} of {prefix} imports, is outside the project"
                )

    def show_places(self, prefix: Path) -> None:
        """Let absolute paths of the project and of moved installations lead to where they are in the jail."""
        project = self._project
        inside = project is not None and prefix.is_relative_to(project)
        for old, new in self.moves.items():
            if _under(Path(old), ("/tmp",)) and not (inside and _under(Path(old), (str(project),))):
                self.late[old] = new
        if project is None or not (inside or self.shows_project):
            return
        name = prefix.relative_to(project).parts[0] if inside and prefix != project else ""
        if prefix == project / name and name in DEFAULT_EXCLUDES:
            self.late[f"{_WORKSPACE}/{name}"] = self.place(str(prefix))
        if _under(project, ("/tmp",)):
            self.late[str(project)] = _WORKSPACE
        elif _under(project, HIDDEN_BY_JAIL):
            if project != Path(_WORKSPACE):
                self.lacks.append(f"{project} is not there under this name, for the jail has its own there")
        else:
            self._link_project(project)

    def _link_project(self, project: Path) -> None:
        taken = [path for path in (*self.binds, *self.links) if path.startswith(f"{project}/")]
        if not taken:
            self.links[str(project)] = _WORKSPACE
            return
        # its folder holds parts of an installation: its other entries lead to the workspace
        held = {os.path.relpath(path, project).split("/")[0] for path in taken}
        for entry in itertools.islice(sorted(os.listdir(project)), _MOST_ENTRIES):
            if entry not in held:
                self.links[f"{project}/{entry}"] = f"{_WORKSPACE}/{entry}"


def _site_folders(prefix: Path) -> Iterator[Path]:
    """The folders of an installation's packages, none behind a link."""
    for folder in sorted(itertools.chain.from_iterable(map(prefix.glob, _SITES))):
        if os.path.realpath(folder) == os.path.join(os.path.realpath(prefix), folder.relative_to(prefix)):
            yield folder


def _relative(file: Path, own: dict[str, str]) -> dict[str, str]:
    """Lines of a .pth file that lead to the project from where it lies -> where they lead in the jail."""
    found = {}
    lines = [] if file.suffix != ".pth" else _lines(file)
    for line in lines:
        path = os.path.normpath(file.parent / line)
        for old, new in own.items():
            if line.startswith("..") and (path == old or path.startswith(f"{old}/")):
                found[line] = new + path[len(old) :]
    return found


def _lines(file: Path) -> list[str]:
    try:
        return read_regular(file, _LONGEST_TEXT).decode("utf-8", "replace").splitlines()
    except (OSError, NotReadable):
        return []


def _names(text: str, place: str) -> bool:
    return re.search(rf"{re.escape(place)}(?![\w.-])", text) is not None


def _is_installation(prefix: Path) -> bool:
    return any(prefix.glob("lib/python3*/os.py"))


def _under(path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _venv_home(prefix: Path) -> Path | None:
    """The `home` of a virtual environment: the folder of the interpreter that created it."""
    try:
        text = read_regular(prefix / "pyvenv.cfg", _LONGEST_TEXT).decode(errors="replace")
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
