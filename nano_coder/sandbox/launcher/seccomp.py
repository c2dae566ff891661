"""The system calls that a jail refuses: a denylist, since an allowlist breaks users' toolchains.

What is refused: new namespaces and mounts, looking into other processes, kernel interfaces with a history
of exploits, memory that no limit counts (memfd, SysV IPC), pushing input to a terminal, and every socket
family but UNIX, INET and INET6 (a network namespace does not confine AF_VSOCK).
"""

from __future__ import annotations

import errno
import functools
import struct

MACHINES = ("x86_64", "aarch64")
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
# offsets into struct seccomp_data; little-endian, so the low half of an argument comes first
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24

_NEW_NAMESPACES = 0x7E02_0000
_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX

# name: its number on each of MACHINES, None where it does not exist; from 424 on they agree
_INSPECTED: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "clone3": (435, 435), "ioctl": (16, 29),
    "socket": (41, 198), "socketpair": (53, 199), "prlimit64": (302, 261),
}  # fmt: skip
"""allowed or refused by their arguments"""
_DENIED: dict[str, tuple[int, int | None]] = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "create_module": (174, None),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116),
    "iopl": (172, None), "ioperm": (173, None),
    "settimeofday": (164, 170), "adjtimex": (159, 171), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "vhangup": (153, 58),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "uselib": (134, None), "personality": (135, 92), "modify_ldt": (154, None), "nfsservctl": (180, 42),
    "sysfs": (139, None),
}  # fmt: skip


def inspected(machine: str) -> dict[str, int]:
    """Name -> number of the system calls whose arguments decide."""
    column = MACHINES.index(machine)
    return {name: numbers[column] for name, numbers in _INSPECTED.items()}


def denied(machine: str) -> dict[str, int]:
    """Name -> number of the system calls that are refused whatever their arguments."""
    column = MACHINES.index(machine)
    return {name: number for name, numbers in _DENIED.items() if (number := numbers[column]) is not None}


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


@functools.cache
def program(machine: str) -> bytes | None:
    """The filter for a machine as classic BPF, eight bytes an instruction; None where there is no table."""
    if machine not in MACHINES:
        return None
    known = inspected(machine)
    kill = _instruction(_RETURN, _KILL)
    code = _instruction(_LOAD, _ARCH) + _instruction(_JUMP_EQUAL, _ARCHITECTURE[machine], 1, 0) + kill
    code += _instruction(_LOAD, _NUMBER)
    if machine == "x86_64":
        code += _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1) + kill
    # glibc falls back to clone, whose flags a filter can read
    code += _when(known["clone3"], _refuse(errno.ENOSYS))
    namespaces = _instruction(_LOAD, _ARGUMENT_0) + _instruction(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1)
    code += _when(known["clone"], namespaces + _refuse(errno.EPERM) + _instruction(_RETURN, _ALLOW))
    code += _when(known["ioctl"], _denied_values(_ARGUMENT_1, _TERMINAL_INPUT, errno.EPERM))
    for name in ("socket", "socketpair"):
        code += _when(known[name], _allowed_values(_ARGUMENT_0, _FAMILIES, errno.EAFNOSUPPORT))
    # of another process: init has our uid, and a CPU limit would let a program end it
    code += _when(known["prlimit64"], _allowed_values(_ARGUMENT_0, (0,), errno.EPERM))
    for number in denied(machine).values():
        code += _when(number, _refuse(errno.EPERM))
    return code + _instruction(_RETURN, _ALLOW)
