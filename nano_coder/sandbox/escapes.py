"""Runs inside a jail: tries to get out, and reports what got through.

Standard library only: the text of this file is the program that the jail runs. The first argument is JSON
with what there is to reach outside; the answer is JSON: attempt -> null, or what was achieved. An attempt
that succeeds leaves no trace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import signal
import socket
import struct
import sys
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {
    "x86_64": {
        "ptrace": 101, "unshare": 272, "mount": 165, "keyctl": 250, "bpf": 321, "userfaultfd": 323,
        "perf_event_open": 298, "io_uring_setup": 425, "open_by_handle_at": 304, "kexec_load": 246,
        "memfd_create": 319, "shmget": 29, "process_vm_readv": 310, "setns": 308, "add_key": 248,
    },
    "aarch64": {
        "ptrace": 117, "unshare": 97, "mount": 40, "keyctl": 219, "bpf": 280, "userfaultfd": 282,
        "perf_event_open": 241, "io_uring_setup": 425, "open_by_handle_at": 265, "kexec_load": 104,
        "memfd_create": 279, "shmget": 194, "process_vm_readv": 270, "setns": 268, "add_key": 217,
    },
}[platform.machine()]  # fmt: skip
_NEWUSER, _ATTACH = 0x1000_0000, 16


def _allowed(name: str, *arguments: object) -> bool:
    """Whether the kernel let a system call through, even if it then found fault with it."""
    result = _libc.syscall(_NUMBERS[name], *arguments)
    return bool(result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS, errno.EACCES))


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""


def read_a_file_of_the_host(outside: dict[str, str]) -> str | None:
    return outside["file"] if _read(outside["file"]) else None


def read_keys_in_an_environment(outside: dict[str, str]) -> str | None:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            if outside["secret"].encode() in _read(f"/proc/{pid}/{name}"):
                return f"/proc/{pid}/{name}"
    return None


def read_the_memory_of_init(outside: dict[str, str]) -> str | None:
    try:
        with open("/proc/1/mem", "rb"):
            return "/proc/1/mem"
    except OSError:
        return "ptrace" if _allowed("ptrace", _ATTACH, 1, 0, 0) else None


def see_processes_of_the_host(outside: dict[str, str]) -> str | None:
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 64]
    return f"pid {others[0]}" if others else None


def kill_init(outside: dict[str, str]) -> str | None:
    if os.getpid() > 64:
        return "not tried: this process is in no pid namespace of its own"
    try:
        os.kill(1, signal.SIGKILL)
        os.kill(1, 0)
    except ProcessLookupError:
        return "pid 1 is gone"
    except OSError:
        return None
    return None


def write_outside_the_workspace(outside: dict[str, str]) -> str | None:
    for folder in (
        "/",
        "/usr",
        "/etc",
        "/opt",
        "/dev",
        "/proc/sys",
        "/root",
        os.path.dirname(sys.executable),
    ):
        try:
            os.mkdir(os.path.join(folder, "nano-escape"))
        except OSError:
            continue
        os.rmdir(os.path.join(folder, "nano-escape"))
        return folder
    return None


def change_a_kernel_setting(outside: dict[str, str]) -> str | None:
    for name in ("kernel/core_pattern", "vm/swappiness", "kernel/hostname"):
        try:
            with open(f"/proc/sys/{name}", "r+") as file:
                file.write(file.read())
        except OSError:
            continue
        return name
    return None


def reach_the_network(outside: dict[str, str]) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            # a datagram socket connects wherever there is a route; nothing is sent
            handle.connect(("192.0.2.1", 9))
        except OSError:
            return None
    return "a route to 192.0.2.1"


def reach_a_server_of_the_host(outside: dict[str, str]) -> str | None:
    with socket.socket() as handle:
        handle.settimeout(1)
        try:
            handle.connect(("127.0.0.1", int(outside["port"])))
        except OSError:
            return None
    return f"port {outside['port']}"


def reach_an_abstract_socket_of_the_host(outside: dict[str, str]) -> str | None:
    with socket.socket(socket.AF_UNIX) as handle:
        try:
            handle.connect("\0" + outside["abstract"])
        except OSError:
            return None
    return outside["abstract"]


def open_a_socket_that_no_namespace_confines(outside: dict[str, str]) -> str | None:
    for name, family in (("AF_VSOCK", 40), ("AF_ALG", 38), ("AF_NETLINK", 16), ("AF_PACKET", 17)):
        try:
            socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM).close()
        except OSError:
            continue
        return name
    return None


def make_a_user_namespace(outside: dict[str, str]) -> str | None:
    return "unshare" if _allowed("unshare", _NEWUSER) else None


def mount_a_file_system(outside: dict[str, str]) -> str | None:
    return "mount" if _allowed("mount", b"none", b"/tmp", b"no-such-type", 0, None) else None


def join_another_namespace(outside: dict[str, str]) -> str | None:
    handle = os.open("/proc/self/ns/user", os.O_RDONLY)
    return "setns" if _allowed("setns", handle, 0) else None


def become_root(outside: dict[str, str]) -> str | None:
    try:
        os.setuid(0)
    except OSError:
        return None
    return "setuid(0)"


def hold_a_capability(outside: dict[str, str]) -> str | None:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    held = [name for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb") if int(fields[name], 16)]
    return held[0] if held else None if fields["NoNewPrivs"].strip() == "1" else "NoNewPrivs is 0"


def call_what_exploits_begin_with(outside: dict[str, str]) -> str | None:
    for name in (
        "bpf", "userfaultfd", "perf_event_open", "io_uring_setup", "keyctl", "add_key", "kexec_load",
        "open_by_handle_at", "process_vm_readv",
    ):  # fmt: skip
        if _allowed(name, 0, 0, 0, 0, 0):
            return name
    return None


def hold_memory_that_nobody_counts(outside: dict[str, str]) -> str | None:
    if _allowed("memfd_create", b"x", 0):
        return "memfd_create"
    return "shmget" if _allowed("shmget", 0, 4096, 0o1600) else None


def type_into_the_terminal(outside: dict[str, str]) -> str | None:
    try:
        slave = os.openpty()[1]
    except OSError:
        slave = 0
    try:
        fcntl.ioctl(slave, 0x5412, struct.pack("c", b"x"))
    except OSError as error:
        return None if error.errno in (errno.EPERM, errno.ENOTTY, errno.EIO) else "TIOCSTI"
    return "TIOCSTI"


def make_a_device(outside: dict[str, str]) -> str | None:
    try:
        os.mknod("/tmp/device", 0o600 | 0o060000, os.makedev(8, 0))
    except OSError:
        return None
    os.unlink("/tmp/device")
    return "a block device"


def learn_the_name_of_the_host(outside: dict[str, str]) -> str | None:
    return outside["host"] if socket.gethostname() == outside["host"] != "sandbox" else None


ATTEMPTS: tuple[Callable[[dict[str, str]], str | None], ...] = (
    read_a_file_of_the_host,
    read_keys_in_an_environment,
    read_the_memory_of_init,
    see_processes_of_the_host,
    kill_init,
    write_outside_the_workspace,
    change_a_kernel_setting,
    reach_the_network,
    reach_a_server_of_the_host,
    reach_an_abstract_socket_of_the_host,
    open_a_socket_that_no_namespace_confines,
    make_a_user_namespace,
    mount_a_file_system,
    join_another_namespace,
    become_root,
    hold_a_capability,
    call_what_exploits_begin_with,
    hold_memory_that_nobody_counts,
    type_into_the_terminal,
    make_a_device,
    learn_the_name_of_the_host,
)

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps({attempt.__name__: attempt(given) for attempt in ATTEMPTS}))
