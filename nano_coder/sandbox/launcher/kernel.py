"""System calls that Python does not wrap, LayerError, which names a failing layer, and Landlock."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import platform
import struct
import time
from collections.abc import Iterator

# PyDLL keeps the interpreter lock across the call, as a raw clone requires
_libc = ctypes.PyDLL(None, use_errno=True)

MACHINE = platform.machine()
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_SYS_OPENAT2 = 437
_SYS_MOUNT_SETATTR = 442

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
NEWUSER, NEWPID, NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
PR_SET_CHILD_SUBREAPER = 36
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_SETPCAP = 1, 2, 3, 8
CAP_SETGID, CAP_SETUID = 6, 7

RESOLVE_NO_MAGICLINKS, RESOLVE_BENEATH = 0x02, 0x08


class LayerError(Exception):
    """A layer of isolation could not be set up."""

    def __init__(self, layer: str, errno: int | None, detail: str) -> None:
        super().__init__(f"{layer}: {detail}")
        self.layer = layer
        self.errno = errno
        self.detail = detail

    def record(self) -> dict[str, object]:
        return {"layer": self.layer, "errno": self.errno, "detail": self.detail}


@contextlib.contextmanager
def layer(name: str) -> Iterator[None]:
    """Turns an OSError in the block into the failure of this layer."""
    try:
        yield
    except OSError as error:
        raise LayerError(name, error.errno, str(error)) from error


def _checked(result: int, what: str) -> int:
    if result == -1:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), what)
    return result


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def syscall(number: int, *arguments: int | bytes | None) -> int:
    """A system call by number. Raises OSError."""
    return _checked(_libc.syscall(number, *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def clone(flags: int) -> int:
    """fork() into new namespaces: 0 in the child, its pid in the parent. The caller must be
    single-threaded."""
    number = _SYS_CLONE.get(MACHINE)
    if number is None:
        raise LayerError("machine", None, f"no jail for {MACHINE!r}; known: {', '.join(_SYS_CLONE)}")
    sigchld = 17
    return _checked(_libc.syscall(number, ctypes.c_ulong(flags | sigchld), 0, 0, 0, 0), "clone")


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    result = _libc.mount(
        _encoded(source), _encoded(target), _encoded(kind), ctypes.c_ulong(flags), _encoded(data)
    )
    _checked(result, f"mount {target}")


def set_mount_attributes(target: str, attributes: int) -> None:
    """Add attributes to a mount and all mounts below it."""
    settings = struct.pack("=QQQQ", attributes, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, settings, len(settings)
    )
    _checked(result, f"mount_setattr {target}")


def detach(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _checked(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), "pivot_root")


def set_host_name(name: str) -> None:
    _checked(_libc.sethostname(name.encode(), len(name)), "sethostname")


def prctl(option: int, argument: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), f"prctl {option}")


def install_filter(program: bytes) -> None:
    """Install a classic BPF program as the seccomp filter of this process and its descendants."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    filter_mode = 2
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(filter_mode), header, 0, 0)
    _checked(result, "seccomp")


def make_timer() -> int:
    """A timer descriptor for `set_timer`. Raises OSError."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    return _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, flags), "timerfd_create")


def set_timer(timer: int, seconds: float) -> None:
    """Make the timer readable once, after `seconds`; 0 disarms it. Raises OSError."""
    later = struct.pack("@4q", 0, 0, int(seconds), int(seconds % 1 * 1e9))
    _checked(_libc.timerfd_settime(timer, 0, later, None), "timerfd_settime")


_kept: tuple[int, ...] = ()


def put(path: str, text: str) -> None:
    """Write a kernel setting with a single write. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


@functools.cache
def last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def keep_capabilities(*kept: int) -> None:
    """Drop every other capability, from the bounding set as well."""
    global _kept
    for capability in range(last_capability() + 1):
        if capability not in kept:
            prctl(PR_CAPBSET_DROP, capability)
    set_capabilities(*kept)
    _kept = kept


def drop_bounding_set() -> None:
    """Empty the bounding set: programs that this process executes get no capabilities; it keeps its own."""
    for capability in _kept:
        prctl(PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    set_capabilities()


def set_capabilities(*kept: int) -> None:
    mask = sum(1 << capability for capability in kept)
    version_3 = 0x2008_0522
    header = struct.pack("=Ii", version_3, 0)
    _checked(_libc.capset(header, struct.pack("=6I", mask, mask, 0, 0, 0, 0)), "capset")


def open_beneath(root: int, path: str, flags: int, mode: int = 0) -> int:
    """openat2 that does not leave `root` by `..`, an absolute path or a symlink (EXDEV)."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, mode, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    return _checked(_libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how)), path)


@contextlib.contextmanager
def as_file_user(uid: int, gid: int) -> Iterator[None]:
    """Inside the block, this thread of root accesses files as another user. Raises OSError."""
    before = os.geteuid(), os.getegid()
    try:
        _set_file_user(uid, gid)
        yield
    finally:
        _set_file_user(*before)


def _set_file_user(uid: int, gid: int) -> None:
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    # setfsuid and setfsgid return the old id and no error; an invalid id (-1) changes nothing
    if (_libc.setfsgid(-1), _libc.setfsuid(-1)) != (gid, uid):
        raise PermissionError(errno.EPERM, f"cannot touch files as user {uid}, group {gid}")


_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_RIGHTS = {2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""version -> mask of all file rights that it knows: truncate came with 3, ioctl on devices with 5"""
_SCOPES = 3
"""mask of abstract UNIX sockets and signals, known since version 6"""
_FILES_WRITABLE = ("/dev", "/proc")
"""devices and a process's own settings: writing to existing files only"""


@functools.cache
def landlock_version() -> int:
    """The kernel's Landlock version; 0 if it has none, or version 1, which cannot rename across folders."""
    try:
        known = syscall(_CREATE, None, 0, _VERSION_FLAG)
    except OSError:
        return 0
    return known if known > 1 else 0


def confine(writable: tuple[str, ...]) -> None:
    """Restrict writing, for this process and its descendants, to `writable`. Raises OSError."""
    known = landlock_version()
    rights = max(mask for since, mask in _RIGHTS.items() if since <= known)
    attributes = struct.pack("=QQQ", rights, 0, _SCOPES if known >= 6 else 0)
    # an older kernel accepts the shorter struct only
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = syscall(_CREATE, attributes[:size], size, 0)
    reading = _EXECUTE | _READ_FILE | _READ_DIR
    _allow(ruleset, "/", reading)
    for path in _FILES_WRITABLE:
        _allow(ruleset, path, (reading | _WRITE_FILE | _TRUNCATE | 1 << 15) & rights)
    for path in writable:
        _allow(ruleset, path, rights)
    syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, folder), 0)
    os.close(folder)
