"""What a jail gets of the host: its root file system, interpreter, limits and control group.

An interpreter is described by looking at files only: it may belong to an untrusted repository, so the host
never runs it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import platform
import pwd
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nano_coder.sandbox.launcher import files, kernel, root, seccomp, zygote
from nano_shared.errors import SandboxError
from nano_shared.files import NotReadable, read_regular
from nano_shared.snapshot import DEFAULT_EXCLUDES
from nano_shared.types import Limits

FILE_MB = 256
"""largest file, MB"""
PROCESSES = 64
"""processes and threads of a program, where its limits name no number"""
_MB = 1 << 20


def always(limits: Limits) -> dict[str, int]:
    """Rlimits that are the same for every request and do not hinder trusted code: set before one comes.

    None bounds addresses: WebAssembly, the JVM, Go and sanitizers reserve far more than they use.
    """
    return {
        "RLIMIT_NOFILE": 256,
        "RLIMIT_NPROC": limits.processes or PROCESSES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
    }


def rlimits(limits: Limits) -> dict[str, int]:
    """Resource name -> soft and hard limit, for a workspace on a disk, where no file system bounds a file."""
    return {"RLIMIT_FSIZE": FILE_MB * _MB, **always(limits)}


_ALWAYS = (
    "empty_environment", "host_uid_not_root", "user_namespace", "mount_namespace", "pid_namespace",
    "network_namespace", "ipc_namespace", "uts_namespace", "cgroup_namespace", "read_only_root",
    "capabilities", "no_new_privs",
)  # fmt: skip


def layers(**others: bool) -> dict[str, bool]:
    """Layer -> whether it is on; `others` are the backend's own."""
    return {
        **dict.fromkeys(_ALWAYS, True),
        "seccomp": seccomp.program(platform.machine()) is not None,
        "rlimits": True,
        "memory_watchdog": True,
        "landlock": kernel.landlock_version() > 0,
        "cgroup": False,
        **others,
    }


_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SHARED = (
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/mime.types",
)
_MADE_UP = (
    ("/etc/passwd", "root:x:0:0:root:/:/usr/sbin/nologin\nuser:x:1000:1000:user:/tmp:/bin/sh\n"),
    ("/etc/group", "root:x:0:\nuser:x:1000:\n"),
    ("/etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
    ("/etc/hostname", "sandbox\n"),
    ("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ("/etc/resolv.conf", ""),
    # git never lists or commits the links to our state and to an environment
    ("/etc/gitconfig", "[core]\n\texcludesFile = /etc/gitignore\n"),
    ("/etc/gitignore", f"/{files.OURS}\n.venv\nvenv\n"),
)


def plan_root(interpreter: Interpreter) -> dict[str, Any]:
    """The plan as plain JSON for the launcher; contains no name of the user, the machine or the workspace."""
    links = list(interpreter.links)
    binds = [("/usr", "/usr"), *interpreter.binds]
    for name in _MERGED:
        path = f"/{name}"
        if os.path.islink(path):
            links.append((os.readlink(path), path))
        elif os.path.isdir(path):
            binds.append((path, path))
    binds.append((os.path.dirname(root.__file__), f"{root.LAUNCHER_INSIDE}/launcher"))
    for path in _SHARED:
        if os.path.exists(path):
            binds.append((os.path.realpath(path), path))
    texts = [(path, text, 0o644) for path, text in _MADE_UP] + list(interpreter.files)
    if interpreter.late:
        texts.append((files.LINKS, json.dumps(interpreter.late), 0o644))
    return {"binds": binds, "links": links, "files": texts, "covers": interpreter.covers}


def unused_uid(wanted: int = 65533) -> int:
    """A uid that no account of this machine has."""
    taken = {account.pw_uid for account in pwd.getpwall()}
    while wanted in taken:
        wanted -= 1
    return wanted


def own_uids() -> bool:
    """Whether each jail can run as a user of its own on the host, with that user's kernel limits for
    itself."""
    with open("/proc/self/uid_map") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    reached = any(
        first <= zygote.UIDS.start and zygote.UIDS.stop <= first + count for first, _, count in extents
    )
    return os.geteuid() == 0 and reached


_CONTROLLERS = ("memory", "pids")
_SHARE = 0.75
"""share of the memory of the machine, or of the enclosing group, that all jails may use together"""
_PROCESSES = 20_000


@lru_cache(maxsize=1)
def plan_cgroup() -> dict[str, Any] | None:
    """The plan from which a launcher creates its control group; None where it cannot, as is usual without
    root."""
    return find_cgroup(Path("/proc/self"), Path("/sys/fs/cgroup"))


def find_cgroup(process: Path, mounts: Path) -> dict[str, Any] | None:
    """As `plan_cgroup`, for the given `/proc/self` and cgroup mount point."""
    try:
        lines = (process / "cgroup").read_text().splitlines()
    except OSError:
        return None
    ours = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    found = _version_1(ours, mounts) or _version_2(ours.get("", "/"), mounts)
    if found is None:
        return None
    version, parents = found
    return {
        "version": version,
        "parents": {controller: str(parent) for controller, parent in parents.items()},
        "memory": int(_memory(parents["memory"], mounts) * _SHARE),
        "pids": _PROCESSES,
    }


def _version_1(ours: dict[str, str], mounts: Path) -> tuple[str, dict[str, Path]] | None:
    parents = {}
    for controller in _CONTROLLERS:
        path = next((path for names, path in ours.items() if controller in names.split(",")), None)
        # in a container the path may be that of the host, while the mount shows our subtree only
        places = [] if path is None else [mounts / controller / path.lstrip("/"), mounts / controller]
        parent = next((place for place in places if _writable(place)), None)
        if parent is None or not (parent / "cgroup.procs").exists():
            return None
        parents[controller] = parent
    return "v1", parents


def _version_2(path: str, mounts: Path) -> tuple[str, dict[str, Path]] | None:
    """The nearest enclosing group that is delegated to us and passes its controllers to its children.

    Usually not our own group: a group with processes cannot pass on controllers.
    """
    if not (mounts / "cgroup.controllers").exists():
        return None
    place = mounts / path.lstrip("/")
    while place.is_relative_to(mounts):
        try:
            handed_on = (place / "cgroup.subtree_control").read_text().split()
        except OSError:
            handed_on = []
        if set(_CONTROLLERS) <= set(handed_on) and _writable(place) and _writable(place / "cgroup.procs"):
            return "v2", dict.fromkeys(_CONTROLLERS, place)
        place = place.parent
    return None


def _writable(place: Path) -> bool:
    return os.access(place, os.W_OK)


def _memory(parent: Path, mounts: Path) -> int:
    """Memory of the machine, or the lowest limit of the groups around `parent`; bytes."""
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    while parent.is_relative_to(mounts):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                least = min(least, int((parent / name).read_text()))
            except (OSError, ValueError):  # "max", or no such file
                continue
        parent = parent.parent
    return least


_CONTAINER = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined"
)


def read_setting(name: str) -> str | None:
    """A kernel setting by its dotted name; None if this kernel does not have it."""
    try:
        with open(os.path.join("/proc/sys", *name.split("."))) as file:
            return file.read().strip()
    except OSError:
        return None


def remedy(
    layer: str, error: int | None, *, is_root: bool, setting: Callable[[str], str | None] = read_setting
) -> str:
    """The command that makes `layer` work, chosen by the kernel's settings."""
    if setting("user.max_user_namespaces") == "0" or error in (errno.ENOSPC, errno.EUSERS):
        return "sudo sysctl -w user.max_user_namespaces=15000"
    if setting("kernel.unprivileged_userns_clone") == "0":
        return "sudo sysctl -w kernel.unprivileged_userns_clone=1"
    if setting("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if error == errno.ENOSYS:
        return "sudo apt-get install linux-image-amd64  # Linux 5.12 or newer is needed"
    return f"{_CONTAINER} --cap-add SYS_ADMIN" if is_root else _CONTAINER


def cannot_isolate(layer: str, error: int | None, detail: str) -> SandboxError:
    """The SandboxError to raise where a layer fails: sandboxes never run programs unconfined instead."""
    command = remedy(layer, error, is_root=os.geteuid() == 0)
    return SandboxError(f"the sandbox cannot put up its layer {layer!r} ({detail}); to mend it: {command}")


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
