"""One jail: fresh namespaces around a small init as pid 1, and the program or file operation it runs."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
import struct
from typing import Any, NoReturn

from . import files, kernel, probe, seccomp

_FLAGS = (
    kernel.NEWUSER | kernel.NEWPID | kernel.NEWNS | kernel.NEWNET
    | kernel.NEWIPC | kernel.NEWUTS | kernel.NEWCGROUP
)  # fmt: skip
_UID_INSIDE = 1000
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV
_TREE_OPERATIONS = ("pack", "unpack")


def spawn(request: dict[str, Any], fds: list[int]) -> tuple[int, int]:
    """Start a jail: the pid of its init, and a pipe on which init reports one JSON object a line.

    `fds` are stdin, stdout and stderr; the caller closes its copies.
    """
    report_in, report_out = os.pipe()
    with kernel.layer("user_namespace"):
        pid = kernel.clone(_FLAGS)
    if pid == 0:
        try:
            _init(request, fds, report_out)
        finally:
            os._exit(70)
    os.close(report_out)
    return pid, report_in


def _init(request: dict[str, Any], fds: list[int], report: int) -> NoReturn:
    _close_all_but({*fds, report})
    try:
        _isolate(request)
    except kernel.LayerError as error:
        _tell(report, error.record())
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        try:
            _user(request, fds, report)
        finally:
            os._exit(70)
    _close_all_but({report})
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            _tell(report, {"status": status})
            # the kernel kills whatever the program left behind
            os._exit(0)


def _tell(report: int, record: dict[str, object]) -> None:
    os.write(report, json.dumps(record).encode() + b"\n")


def _close_all_but(kept: set[int]) -> None:
    low = 0
    for fd in [*sorted(kept), 1 << 20]:
        # an empty range that begins at 0 would close everything
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1


def _isolate(request: dict[str, Any]) -> None:
    # first, so that a dead parent leaves no init behind
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    with kernel.layer("user_namespace"):
        map_one_user(_UID_INSIDE, request["uid"], request["gid"])
    with kernel.layer("mount_namespace"):
        for target, megabytes, mode in (("/tmp", request["tmp_mb"], 1777), ("/dev/shm", 64, 1777)):
            options = f"size={megabytes}m,nr_inodes=65536,mode={mode}"
            kernel.mount("tmpfs", target, "tmpfs", _QUIET, options)
    with kernel.layer("proc"):
        kernel.mount("proc", "/proc", "proc", _QUIET | kernel.MS_NOEXEC)
        # a second wall behind seccomp: no user namespace below this one
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
        kernel.mount("/proc/sys", "/proc/sys", None, kernel.MS_BIND | kernel.MS_REC)
        kernel.set_mount_attributes("/proc/sys", kernel.ATTR_RDONLY)
    with kernel.layer("network_namespace"):
        _loopback_up()
    with kernel.layer("uts_namespace"):
        kernel.set_host_name("sandbox")
    with kernel.layer("capabilities"):
        trees = (kernel.CAP_DAC_OVERRIDE, kernel.CAP_DAC_READ_SEARCH, kernel.CAP_FOWNER)
        kernel.keep_capabilities(*(trees if request["op"] in _TREE_OPERATIONS else ()))
    with kernel.layer("rlimits"), open("/proc/self/oom_score_adj", "w") as badness:
        # should the machine run out of memory, a jail goes first
        badness.write("1000")
    with kernel.layer("no_new_privs"):
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    program = seccomp.program(kernel.MACHINE)
    if program is not None:
        with kernel.layer("seccomp"):
            kernel.install_filter(program)


def map_one_user(inside: int, uid: int, gid: int) -> None:
    """Make `uid` and `gid` of the parent namespace `inside` in ours."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _loopback_up() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, get_flags, struct.pack("16sh22x", b"lo", 0))
        flags = struct.unpack("16sh22x", answer)[1]
        fcntl.ioctl(handle, set_flags, struct.pack("16sh22x", b"lo", flags | up))


def _user(request: dict[str, Any], fds: list[int], report: int) -> NoReturn:
    os.setsid()
    if request["op"] == "run":
        os.close(report)
        _exec(request, fds)
    try:
        _operate(request, fds)
    except OSError as error:
        _tell(report, {"refused": [error.errno or errno.EIO, error.strerror or str(error)]})
        os._exit(1)
    os._exit(0)


def _operate(request: dict[str, Any], fds: list[int]) -> None:
    root = os.open("/work", os.O_PATH | os.O_DIRECTORY)
    data, out = fds[0], fds[1]
    if request["op"] == "read":
        files.read(root, request["path"], out)
    elif request["op"] == "write":
        files.write(root, request["path"], data)
    elif request["op"] == "pack":
        with open(out, "wb", closefd=False) as target:
            files.pack("/work", target)
    elif request["op"] == "unpack":
        with open(data, "rb", closefd=False) as source:
            files.clear("/work")
            files.unpack(root, source)
            os.chmod("/work", 0o755)
    else:
        with open(out, "w", closefd=False) as target_text:
            json.dump(probe.attempts(request["secret"]), target_text)


def _exec(request: dict[str, Any], fds: list[int]) -> NoReturn:
    for number, fd in enumerate(fds):
        # above the standard three, so that no copy overwrites one that is still needed
        fds[number] = fcntl.fcntl(fd, fcntl.F_DUPFD, 10)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    _close_all_but({0, 1, 2})
    _limit(request["rlimits"])
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and not 32 <= number < 34:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    argv, env = request["argv"], request["env"]
    try:
        os.chdir("/work")
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def exit_record(status: int) -> dict[str, int | None]:
    """A wait status as exit code and signal, one of which is None."""
    code = os.waitstatus_to_exitcode(status)
    return {"exit_code": code, "signal": None} if code >= 0 else {"exit_code": None, "signal": -code}
