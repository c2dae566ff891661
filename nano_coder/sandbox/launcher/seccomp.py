"""The system calls that a jail refuses: a denylist, since an allowlist breaks users' toolchains.

What is refused: new namespaces and mounts, looking into other processes, kernel interfaces with a history
of exploits, memory that no limit counts (memfd, SysV IPC), pushing input to a terminal, and every socket
family but UNIX, INET and INET6 (a network namespace does not confine AF_VSOCK).
"""

from __future__ import annotations

import errno
import struct

_ARCH_X86_64 = 0xC000_003E
_X32_BIT = 0x4000_0000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
# offsets into struct seccomp_data; little-endian, so the low half of an argument comes first
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24

_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR, _PRLIMIT = 56, 435, 16, 41, 53, 302
_NEW_NAMESPACES = 0x7E02_0000
_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

DENIED_X86_64 = {
    "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_tree_attr": 467,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
    "process_madvise": 440, "bpf": 321, "userfaultfd": 323, "perf_event_open": 298,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "create_module": 174,
    "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168,
    "acct": 163, "quotactl": 179, "quotactl_fd": 443, "syslog": 103, "iopl": 172, "ioperm": 173,
    "settimeofday": 164, "adjtimex": 159, "clock_settime": 227, "clock_adjtime": 305,
    "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "lookup_dcookie": 212,
    "move_pages": 279, "migrate_pages": 256, "mbind": 237, "set_mempolicy": 238, "vhangup": 153,
    "memfd_create": 319, "memfd_secret": 447,
    "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65, "semctl": 66,
    "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71,
    "uselib": 134, "personality": 135, "modify_ldt": 154, "nfsservctl": 180, "sysfs": 139,
}  # fmt: skip


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)


def _when(number: int, body: bytes) -> bytes:
    """Run `body` for one system call, and skip it for all others."""
    return _instruction(_JUMP_EQUAL, number, 0, len(body) // 8) + body


def _allowed_values(offset: int, values: tuple[int, ...], error: int) -> bytes:
    """Refuse unless the argument is one of these."""
    body = _instruction(_LOAD, offset)
    for index, value in enumerate(values):
        body += _instruction(_JUMP_EQUAL, value, len(values) - index, 0)
    return body + _refuse(error) + _instruction(_RETURN, _ALLOW)


def _denied_values(offset: int, values: tuple[int, ...], error: int) -> bytes:
    body = _instruction(_LOAD, offset)
    for index, value in enumerate(values):
        body += _instruction(_JUMP_EQUAL, value, len(values) - index, 0)
    return body + _instruction(_RETURN, _ALLOW) + _refuse(error)


def program_x86_64() -> bytes:
    """The filter as classic BPF, eight bytes an instruction."""
    kill = _instruction(_RETURN, _KILL)
    code = _instruction(_LOAD, _ARCH) + _instruction(_JUMP_EQUAL, _ARCH_X86_64, 1, 0) + kill
    code += _instruction(_LOAD, _NUMBER) + _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1) + kill
    # glibc falls back to clone, whose flags a filter can read
    code += _when(_CLONE3, _refuse(errno.ENOSYS))
    namespaces = _instruction(_LOAD, _ARGUMENT_0) + _instruction(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    code += _when(_CLONE, namespaces + _refuse(errno.EPERM) + _instruction(_RETURN, _ALLOW))
    code += _when(_IOCTL, _denied_values(_ARGUMENT_1, _TERMINAL_INPUT, errno.EPERM))
    for number in (_SOCKET, _SOCKETPAIR):
        code += _when(number, _allowed_values(_ARGUMENT_0, _FAMILIES, errno.EAFNOSUPPORT))
    # of another process: init has our uid, and a CPU limit would let a program end it
    code += _when(_PRLIMIT, _allowed_values(_ARGUMENT_0, (0,), errno.EPERM))
    for number in DENIED_X86_64.values():
        code += _when(number, _refuse(errno.EPERM))
    return code + _instruction(_RETURN, _ALLOW)


def program(machine: str) -> bytes | None:
    """The filter for a machine, or None where there is no table for it."""
    return program_x86_64() if machine == "x86_64" else None
