"""Escape attempts: the program that runs in a jail and reports which of them got through.

Standard library only: the text of this file is the program that the jail runs. Its input is JSON with the
host's resources to reach for; its output is JSON, attempt -> null or what was achieved. An attempt that
raises OSError was stopped; one that succeeds leaves no trace.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {
    "x86_64": {
        "ptrace": 101, "unshare": 272, "mount": 165, "keyctl": 250, "bpf": 321, "userfaultfd": 323,
        "perf_event_open": 298, "io_uring_setup": 425, "open_by_handle_at": 304, "kexec_load": 246,
        "memfd_create": 319, "shmget": 29, "process_vm_readv": 310, "setns": 308, "add_key": 248,
        "io_setup": 206, "syncfs": 306, "clone": 56, "syslog": 103, "seccomp": 317,
    },
    "aarch64": {
        "ptrace": 117, "unshare": 97, "mount": 40, "keyctl": 219, "bpf": 280, "userfaultfd": 282,
        "perf_event_open": 241, "io_uring_setup": 425, "open_by_handle_at": 265, "kexec_load": 104,
        "memfd_create": 279, "shmget": 194, "process_vm_readv": 270, "setns": 268, "add_key": 217,
        "io_setup": 0, "syncfs": 267, "clone": 220, "syslog": 116, "seccomp": 277,
    },
}.get(platform.machine(), {})  # fmt: skip
_NEWUSER, _ATTACH = 0x1000_0000, 16


Attempt = Callable[[dict[str, str]], "str | None"]
ATTEMPTS: dict[str, tuple[Attempt, str]] = {}
"""name -> the attempt, and the layer that should stop it"""


def stopped_by(layer: str) -> Callable[[Attempt], Attempt]:
    def register(attempt: Attempt) -> Attempt:
        ATTEMPTS[attempt.__name__] = attempt, layer
        return attempt

    return register


def _allowed(call: str | int, *arguments: object) -> bool:
    """Whether the kernel executed a system call, even if it rejected the arguments."""
    result = _libc.syscall(_NUMBERS[call] if isinstance(call, str) else call, *arguments)
    refusals = (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EOPNOTSUPP)
    return bool(result != -1 or ctypes.get_errno() not in refusals)


def _in_a_child(attempt: Callable[[], object]) -> bool:
    """Whether `attempt`, in a child process, neither raises OSError, returns False nor dies."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(attempt() is not False)
        except OSError:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""


@stopped_by("mount namespace")
def read_a_file_of_the_host(outside: dict[str, str]) -> str | None:
    return outside["file"] if _read(outside["file"]) else None


@stopped_by("empty environment")
def read_keys_in_an_environment(outside: dict[str, str]) -> str | None:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            if outside["secret"].encode() in _read(f"/proc/{pid}/{name}"):
                return f"/proc/{pid}/{name}"
    return None


@stopped_by("seccomp, not dumpable")
def read_the_memory_of_init(outside: dict[str, str]) -> str | None:
    try:
        with open("/proc/1/mem", "rb"):
            return "/proc/1/mem"
    except OSError:
        return "ptrace" if _allowed("ptrace", _ATTACH, 1, 0, 0) else None


@stopped_by("pid namespace")
def see_processes_of_the_host(outside: dict[str, str]) -> str | None:
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 64]
    return f"pid {others[0]}" if others else None


@stopped_by("pid namespace")
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


@stopped_by("read-only root")
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


@stopped_by("read-only /proc/sys")
def change_a_kernel_setting(outside: dict[str, str]) -> str | None:
    for name in ("kernel/core_pattern", "vm/swappiness", "kernel/hostname"):
        try:
            with open(f"/proc/sys/{name}", "r+") as file:
                file.write(file.read())
        except OSError:
            continue
        return name
    return None


@stopped_by("network namespace")
def reach_the_network(outside: dict[str, str]) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            # a datagram socket connects wherever there is a route; nothing is sent
            handle.connect(("192.0.2.1", 9))
        except OSError:
            return None
    return "a route to 192.0.2.1"


@stopped_by("network namespace")
def reach_a_server_of_the_host(outside: dict[str, str]) -> str | None:
    with socket.socket() as handle:
        handle.settimeout(1)
        try:
            handle.connect(("127.0.0.1", int(outside["port"])))
        except OSError:
            return None
    return f"port {outside['port']}"


@stopped_by("network namespace")
def reach_an_abstract_socket_of_the_host(outside: dict[str, str]) -> str | None:
    with socket.socket(socket.AF_UNIX) as handle:
        try:
            handle.connect("\0" + outside["abstract"])
        except OSError:
            return None
    return outside["abstract"]


@stopped_by("seccomp")
def open_a_socket_that_no_namespace_confines(outside: dict[str, str]) -> str | None:
    for name, family in (("AF_VSOCK", 40), ("AF_ALG", 38), ("AF_NETLINK", 16), ("AF_PACKET", 17)):
        try:
            socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM).close()
        except OSError:
            continue
        return name
    return None


@stopped_by("seccomp")
def make_a_user_namespace(outside: dict[str, str]) -> str | None:
    return "unshare" if _allowed("unshare", _NEWUSER) else None


@stopped_by("seccomp")
def mount_a_file_system(outside: dict[str, str]) -> str | None:
    return "mount" if _allowed("mount", b"none", b"/tmp", b"no-such-type", 0, None) else None


@stopped_by("seccomp")
def join_another_namespace(outside: dict[str, str]) -> str | None:
    handle = os.open("/proc/self/ns/user", os.O_RDONLY)
    return "setns" if _allowed("setns", handle, 0) else None


@stopped_by("user namespace")
def become_root(outside: dict[str, str]) -> str | None:
    try:
        os.setuid(0)
    except OSError:
        return None
    return "setuid(0)"


@stopped_by("capabilities")
def hold_a_capability(outside: dict[str, str]) -> str | None:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    held = [name for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb") if int(fields[name], 16)]
    return held[0] if held else None if fields["NoNewPrivs"].strip() == "1" else "NoNewPrivs is 0"


@stopped_by("seccomp")
def call_what_exploits_begin_with(outside: dict[str, str]) -> str | None:
    for name in (
        "bpf", "userfaultfd", "perf_event_open", "io_uring_setup", "keyctl", "add_key", "kexec_load",
        "open_by_handle_at", "process_vm_readv",
    ):  # fmt: skip
        if _allowed(name, 0, 0, 0, 0, 0):
            return name
    return None


@stopped_by("seccomp")
def hold_memory_that_nobody_counts(outside: dict[str, str]) -> str | None:
    if _allowed("memfd_create", b"x", 0):
        return "memfd_create"
    return "shmget" if _allowed("shmget", 0, 4096, 0o1600) else None


@stopped_by("seccomp, own session")
def type_into_the_terminal(outside: dict[str, str]) -> str | None:
    try:
        opened = os.openpty()
    except OSError:
        opened = (0, 0)
    for request in (0x5412, 0x541C, 0x5423):  # TIOCSTI, TIOCLINUX, TIOCSETD
        try:
            fcntl.ioctl(opened[1], request, struct.pack("i", 3))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.ENOTTY, errno.EIO):
                continue
        return hex(request)
    for fd in set(opened) - {0}:
        os.close(fd)
    return None


@stopped_by("user namespace")
def make_a_device(outside: dict[str, str]) -> str | None:
    try:
        os.mknod("/tmp/device", 0o600 | 0o060000, os.makedev(8, 0))
    except OSError:
        return None
    os.unlink("/tmp/device")
    return "a block device"


@stopped_by("uts namespace")
def learn_the_name_of_the_host(outside: dict[str, str]) -> str | None:
    return outside["host"] if socket.gethostname() == outside["host"] != "sandbox" else None


@stopped_by("second mount namespace")
def see_folders_of_the_host_in_lists_of_mounts(outside: dict[str, str]) -> str | None:
    for pid in ("self", "1"):
        for line in _read(f"/proc/{pid}/mountinfo").decode().splitlines():
            if line.split()[3] not in ("/", "/sys") and not line.split()[3].startswith(("/usr", "/etc")):
                return line.split()[3]
    return None


@stopped_by("closed descriptors")
def inherit_an_open_file(outside: dict[str, str]) -> str | None:
    own = ("/dev/null", "/proc/", "/memfd:")
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith("/") and not path.startswith(own):
            return path
    return None


@stopped_by("mount namespace")
def reach_a_service_of_the_host(outside: dict[str, str]) -> str | None:
    for path in (
        "/run/docker.sock",
        "/var/run/docker.sock",
        "/run/dbus/system_bus_socket",
        "/run/systemd/private",
    ):
        with socket.socket(socket.AF_UNIX) as handle:
            if handle.connect_ex(path) == 0:
                return path
    return None


@stopped_by("mount namespace")
def open_a_device_of_the_host(outside: dict[str, str]) -> str | None:
    names = (
        "mem", "kmsg", "kvm", "fuse", "net/tun", "sda", "vda", "mapper/control", "loop-control",
    )  # fmt: skip
    found = [name for name in names if os.path.exists(f"/dev/{name}")]
    # a jail's own instance has no terminal before one is opened
    terminals = os.listdir("/dev/pts") if os.path.exists("/dev/pts") else []
    found += [f"pts/{name}" for name in terminals if name != "ptmx"]
    # containers have it; it opens the terminal of the session, if there is one
    found += ["tty"] if _opens("/dev/tty") else []
    return f"/dev/{found[0]}" if found else None


@stopped_by("seccomp")
def read_the_log_of_the_kernel(outside: dict[str, str]) -> str | None:
    if _allowed("syslog", 3, ctypes.create_string_buffer(16), 16):
        return "syslog"
    return next((path for path in ("/proc/kmsg", "/proc/kcore") if _opens(path)), None)


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@stopped_by("seccomp")
def change_the_clock(outside: dict[str, str]) -> str | None:
    time.clock_settime(time.CLOCK_REALTIME, time.time())
    return "clock_settime"


@stopped_by("capabilities")
def change_the_name_of_the_machine(outside: dict[str, str]) -> str | None:
    socket.sethostname(socket.gethostname())
    return "sethostname"


@stopped_by("capabilities")
def change_a_network_device(outside: dict[str, str]) -> str | None:
    set_flags = 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, set_flags, struct.pack("16sh22x", b"lo", 1))
    return "lo"


@stopped_by("capabilities")
def run_before_others(outside: dict[str, str]) -> str | None:
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    return "a priority of -5"


@stopped_by("capabilities")
def join_other_groups(outside: dict[str, str]) -> str | None:
    return "setgroups" if _in_a_child(lambda: os.setgroups([0])) else None


@stopped_by("seccomp")
def move_its_root(outside: dict[str, str]) -> str | None:
    return "chroot" if _in_a_child(lambda: os.chroot("/tmp")) else None


@stopped_by("seccomp")
def limit_init(outside: dict[str, str]) -> str | None:
    resource.prlimit(1, resource.RLIMIT_CPU, resource.prlimit(1, resource.RLIMIT_CPU))
    return "prlimit"


@stopped_by("rlimits")
def raise_its_own_limits(outside: dict[str, str]) -> str | None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if hard == resource.RLIM_INFINITY:
        return "there is none"
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard + 1, hard + 1))
    except ValueError:
        return None
    return f"{hard + 1} processes"


@stopped_by("seccomp")
def be_traced(outside: dict[str, str]) -> str | None:
    trace_me = 0
    return "ptrace" if _in_a_child(lambda: _allowed("ptrace", trace_me, 0, 0, 0)) else None


@stopped_by("seccomp")
def call_what_is_younger_than_the_filter(outside: dict[str, str]) -> str | None:
    names = {
        "statmount": 457, "listmount": 458, "setxattrat": 463, "open_tree_attr": 467, "file_setattr": 469,
    }  # fmt: skip
    return next((name for name, number in names.items() if _allowed(number, 0, 0, 0, 0, 0, 0)), None)


@stopped_by("seccomp")
def call_as_another_machine(outside: dict[str, str]) -> str | None:
    if platform.machine() != "x86_64":
        return None
    getpid_32 = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(getpid_32)
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    x32_getpid = 0x4000_0027
    if _in_a_child(lambda: call() > 0):
        return "int 0x80"
    return "x32" if _in_a_child(lambda: _libc.syscall(x32_getpid) > 0) else None


@stopped_by("seccomp")
def filter_system_calls_itself(outside: dict[str, str]) -> str | None:
    set_seccomp, filter_mode = 22, 2
    _libc.prctl(set_seccomp, filter_mode, None, 0, 0)
    # a kernel that executes the call fails for want of the program
    return "seccomp" if ctypes.get_errno() == errno.EFAULT or _allowed("seccomp", 1, 0, None) else None


@stopped_by("seccomp")
def keep_rules_in_the_kernel(outside: dict[str, str]) -> str | None:
    landlock_create_ruleset, ask_version = 444, 1
    return "landlock" if _allowed(landlock_create_ruleset, None, 0, ask_version) else None


@stopped_by("seccomp")
def keep_extended_attributes(outside: dict[str, str]) -> str | None:
    with open("/tmp/attributes", "wb") as file:
        pass
    try:
        os.setxattr(file.name, "user.nano", b"x" * 1000)
    finally:
        os.unlink(file.name)
    return "setxattr"


@stopped_by("seccomp")
def take_slots_of_asynchronous_io(outside: dict[str, str]) -> str | None:
    context = ctypes.c_ulong(0)
    return "io_setup" if _allowed("io_setup", 1, ctypes.byref(context)) else None


@stopped_by("seccomp")
def take_huge_pages(outside: dict[str, str]) -> str | None:
    huge = 0x4_0000
    mmap.mmap(-1, 1 << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | huge).close()
    return "mmap"


@stopped_by("seccomp")
def take_hash_tables(outside: dict[str, str]) -> str | None:
    futex_hash, set_slots = 78, 1
    return "prctl" if _libc.prctl(futex_hash, set_slots, 16, 0, 0) == 0 else None


@stopped_by("seccomp")
def take_flow_labels(outside: dict[str, str]) -> str | None:
    manage = 32
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as handle:
        try:
            handle.setsockopt(socket.IPPROTO_IPV6, manage, b"x")
        except OSError as error:
            return None if error.errno == errno.EPERM else "IPV6_FLOWLABEL_MGR"
    return "IPV6_FLOWLABEL_MGR"


@stopped_by("seccomp")
def attach_filters_to_sockets(outside: dict[str, str]) -> str | None:
    options = {"SO_ATTACH_FILTER": 26, "SO_ATTACH_BPF": 50, "SO_ATTACH_REUSEPORT_CBPF": 51}
    for name, option in options.items():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            try:
                handle.setsockopt(socket.SOL_SOCKET, option, b"x")
            except OSError as error:
                if error.errno == errno.EPERM:
                    continue
        return name
    return None


@stopped_by("seccomp")
def open_sockets_whose_buffers_nobody_counts(outside: dict[str, str]) -> str | None:
    for name, kind, protocol in (
        ("MPTCP", socket.SOCK_STREAM, 262), ("UDP-Lite", socket.SOCK_DGRAM, 136), ("DCCP", 6, 33),
        ("SCTP", socket.SOCK_STREAM, 132), ("ICMP", socket.SOCK_DGRAM, 1), ("none", socket.SOCK_SEQPACKET, 0),
    ):  # fmt: skip
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                socket.socket(family, kind, protocol).close()
            except OSError:
                continue
            return name
    return None


@stopped_by("seccomp")
def enlarge_a_pipe(outside: dict[str, str]) -> str | None:
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    finally:
        os.close(reading)
        os.close(writing)
    return "F_SETPIPE_SZ"


@stopped_by("seccomp")
def lock_in_the_name_of_nobody(outside: dict[str, str]) -> str | None:
    set_lock, whole = 37, struct.pack("hhqqi4x", 1, 0, 0, 0, 0)
    with open("/tmp/lock", "wb") as file:
        os.unlink(file.name)
        try:
            fcntl.fcntl(file, set_lock, whole)
        except OSError:
            share_files, child_signal = 0x400, 17
            pid = _libc.syscall(_NUMBERS["clone"], share_files | child_signal, 0, 0, 0, 0)
            if pid == 0:
                os._exit(0)
            if pid < 0:
                return None
            os.waitpid(pid, 0)
            return "clone(CLONE_FILES)"
    return "F_OFD_SETLK"


@stopped_by("seccomp")
def wait_for_the_disks_of_the_host(outside: dict[str, str]) -> str | None:
    # a kernel that executes the call fails for want of the file
    return (
        "syncfs"
        if _libc.syscall(_NUMBERS["syncfs"], -1) == -1 and ctypes.get_errno() == errno.EBADF
        else None
    )


@stopped_by("user namespace")
def watch_files_without_end(outside: dict[str, str]) -> str | None:
    made: list[int] = []
    while len(made) < 64 and (fd := _libc.inotify_init()) >= 0:
        made.append(fd)
    for fd in made:
        os.close(fd)
    return f"{len(made)} watchers" if len(made) > 16 else None


@stopped_by("rlimits")
def keep_descriptors_in_flight(outside: dict[str, str]) -> str | None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        sent = 0
        try:
            while sent < 1000:
                socket.send_fds(ours, [b"x"], [0] * 50)
                sent += 50
        except OSError:
            pass
    return f"{sent} descriptors" if sent > 512 else None


@stopped_by("rlimits")
def use_descriptors_without_end(outside: dict[str, str]) -> str | None:
    made: list[int] = []
    try:
        while len(made) < 2000:
            made.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for fd in made:
        os.close(fd)
    return f"{len(made)} descriptors" if len(made) > 512 else None


def _achieved(attempt: Attempt, outside: dict[str, str]) -> str | None:
    try:
        return attempt(outside)
    except OSError:
        return None


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps({name: _achieved(attempt, given) for name, (attempt, _) in ATTEMPTS.items()}))
