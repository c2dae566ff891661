"""The seccomp filter: the list of system calls that a jail refuses. An allowlist would break toolchains.

Refused are: new namespaces and mounts; access to other processes; kernel interfaces with a history of
exploits; kernel memory that no limit counts (memfd, SysV IPC, extended attributes, socket filters, further
seccomp filters and Landlock rules); resources of the whole machine (AIO slots, huge pages, IPv6 flow labels,
syncing disks); pushing input to a terminal, and line disciplines; and all sockets except UNIX, TCP and UDP,
since a network namespace does not confine AF_VSOCK. System calls newer than this list do not exist in a jail.
"""

from __future__ import annotations

import errno
import functools
import struct

MACHINES = ("x86_64", "aarch64")
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32_BIT = 0x4000_0000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
# offsets into struct seccomp_data; little-endian, so the low half of an argument comes first
_NUMBER, _ARCH, _ARGUMENT_0, _ARGUMENT_1, _ARGUMENT_2, _ARGUMENT_3 = 0, 4, 16, 24, 32, 40

_NEW_NAMESPACES = 0x7E02_0000
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x1_0000
_UNIX, _INTERNET = (1,), (2, 10)
_TYPE_BITS, _STREAM_DATAGRAM, _TCP_UDP = 0xF, (1, 2), (0, 6, 17)
_TERMINAL = (0x5412, 0x541C, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCSETD, which loads kernel modules
_MAP_HUGETLB = 0x4_0000
_SOCKET_OPTIONS = {
    1: (26, 50, 51, 52),  # SO_ATTACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF and _EBPF
    6: (14, 31, 32, 38),  # TCP_MD5SIG, TCP_ULP, TCP_MD5SIG_EXT, TCP_AO_ADD_KEY
    17: (100,),  # UDP_ENCAP
    41: (32,),  # IPV6_FLOWLABEL_MGR
}
"""level -> options that take kernel memory besides the socket's buffers, or of which the machine has few"""
_FILE_COMMANDS = {
    37: errno.EINVAL,  # F_OFD_SETLK: /proc/locks does not say whose they are
    38: errno.EINVAL,  # F_OFD_SETLKW
    1024: errno.EINVAL,  # F_SETLEASE
    1026: errno.EINVAL,  # F_NOTIFY
    1031: errno.EPERM,  # F_SETPIPE_SZ
}
"""commands of fcntl -> error that they return"""
_SET_SECCOMP, _FIRST_UNKNOWN_OPTION, _KNOWN_OPTIONS = 22, 78, (0x5356_4D41, 0x4155_5856)
"""of prctl: from the first unknown option on all are refused (PR_FUTEX_HASH takes memory), except the known
PR_SET_VMA and PR_GET_AUXV"""

# name: its number on each of MACHINES, None where it does not exist; from 424 on the numbers agree
_INSPECTED: dict[str, tuple[int, int]] = {
    "clone": (56, 220), "ioctl": (16, 29), "fcntl": (72, 25), "prctl": (157, 167), "mmap": (9, 222),
    "socket": (41, 198), "socketpair": (53, 199), "setsockopt": (54, 208), "prlimit64": (302, 261),
}  # fmt: skip
"""system calls that are allowed or refused by their arguments"""
_DENIED: dict[str, tuple[int, int | None]] = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "clone3": (435, 435), "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3),
    "io_getevents": (208, 4), "io_pgetevents": (333, 292),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "sync": (162, 81), "syncfs": (306, 267),
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
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "vhangup": (153, 58),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191),
    "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "uselib": (134, None), "personality": (135, 92), "modify_ldt": (154, None), "nfsservctl": (180, 42),
    "sysfs": (139, None),
}  # fmt: skip
_LIKE_NONE = ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self")
_LIKE_OLD = ("io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents", "io_pgetevents", "seccomp")
_ANSWERS = {
    "clone3": errno.ENOSYS,  # glibc falls back to clone, whose flags a filter can read
    # the error of a file system or kernel without them: programs cope with it
    **dict.fromkeys(("setxattr", "lsetxattr", "fsetxattr", *_LIKE_NONE), errno.EOPNOTSUPP),
    **dict.fromkeys(_LIKE_OLD, errno.ENOSYS),
    # pretended success: a jail has nothing on disk, and must not sync the host's disks
    **dict.fromkeys(("sync", "syncfs"), 0),
}
"""name -> error, if it is not EPERM"""
_END_OF_OWN = {"x86_64": 337, "aarch64": 295}
"""end of the range of numbers that differ between machines"""
_COMMON = range(424, 451)
_YOUNGER = (452, 453, 462)
"""fchmodat2, map_shadow_stack and mseal, which C libraries call"""


def inspected(machine: str) -> dict[str, int]:
    """Name -> number of the system calls that are decided by their arguments."""
    column = MACHINES.index(machine)
    return {name: numbers[column] for name, numbers in _INSPECTED.items()}


def denied(machine: str) -> dict[str, int]:
    """Name -> number of the system calls that are always refused."""
    column = MACHINES.index(machine)
    return {name: number for name, numbers in _DENIED.items() if (number := numbers[column]) is not None}


def answer(name: str) -> int:
    """The error that a refused system call returns; 0 if it pretends success."""
    return _ANSWERS.get(name, errno.EPERM)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | error)


_PASS = _instruction(_RETURN, _ALLOW)


def _if(code: int, value: int, then: bytes, otherwise: bytes) -> bytes:
    """A comparison with the loaded value; both branches return. Raises struct.error if `then` is too long."""
    return _instruction(code, value, 0, len(then) // 8) + then + otherwise


def _among(values: tuple[int, ...], then: bytes, otherwise: bytes) -> bytes:
    """`then` if the loaded value is one of `values`."""
    tests = b""
    for index, value in enumerate(values):
        tests += _instruction(_JUMP_EQUAL, value, len(values) - 1 - index + len(otherwise) // 8)
    return tests + otherwise + then


def _on(offset: int, test: bytes) -> bytes:
    return _instruction(_LOAD, offset) + test


def _clone() -> bytes:
    refuse = _refuse(errno.EPERM)
    # a lock that a process takes while another shares its files belongs to nobody
    sharing = _if(_JUMP_ANY_BIT, _CLONE_THREAD, _PASS, refuse)
    processes = _if(_JUMP_ANY_BIT, _CLONE_FILES, sharing, _PASS)
    return _on(_ARGUMENT_0, _if(_JUMP_ANY_BIT, _NEW_NAMESPACES, refuse, processes))


def _socket() -> bytes:
    protocol = _on(_ARGUMENT_2, _among(_TCP_UDP, _PASS, _refuse(errno.EPROTONOSUPPORT)))
    kinds = _among(_STREAM_DATAGRAM, protocol, _refuse(errno.ESOCKTNOSUPPORT))
    internet = _on(_ARGUMENT_1, _instruction(_AND, _TYPE_BITS) + kinds)
    families = _among(_INTERNET, internet, _refuse(errno.EAFNOSUPPORT))
    return _on(_ARGUMENT_0, _among(_UNIX, _PASS, families))


def _set_socket_option() -> bytes:
    levels = _PASS
    for level, options in _SOCKET_OPTIONS.items():
        refused = _among(options, _refuse(errno.EPERM), _PASS)
        levels = _if(_JUMP_EQUAL, level, _on(_ARGUMENT_2, refused), levels)
    return _on(_ARGUMENT_1, levels)


def _file_control() -> bytes:
    commands = _PASS
    for command, error in _FILE_COMMANDS.items():
        commands = _if(_JUMP_EQUAL, command, _refuse(error), commands)
    return _on(_ARGUMENT_1, commands)


def _process_control() -> bytes:
    invalid = _refuse(errno.EINVAL)
    young = _among(_KNOWN_OPTIONS, _PASS, invalid)
    old = _if(_JUMP_EQUAL, _SET_SECCOMP, invalid, _PASS)
    return _on(_ARGUMENT_0, _if(_JUMP_AT_LEAST, _FIRST_UNKNOWN_OPTION, young, old))


def _inspections() -> dict[str, bytes]:
    """Name -> the instructions that check the arguments of this system call."""
    refuse, no_memory = _refuse(errno.EPERM), _refuse(errno.ENOMEM)
    return {
        "clone": _clone(),
        "socket": _socket(),
        "socketpair": _on(_ARGUMENT_0, _among(_UNIX, _PASS, _refuse(errno.EAFNOSUPPORT))),
        "setsockopt": _set_socket_option(),
        "fcntl": _file_control(),
        "prctl": _process_control(),
        "mmap": _on(_ARGUMENT_3, _if(_JUMP_ANY_BIT, _MAP_HUGETLB, no_memory, _PASS)),
        "ioctl": _on(_ARGUMENT_1, _among(_TERMINAL, refuse, _PASS)),
        # of another process: init has the same uid, and with a CPU limit a program could end it
        "prlimit64": _on(_ARGUMENT_0, _among((0,), _PASS, refuse)),
    }


def _tree(parts: list[tuple[int, bytes]]) -> bytes:
    """A binary search over the numbers: the kernel simulates the program for each number at installation."""
    if len(parts) == 1:
        return parts[0][1]
    middle = len(parts) // 2
    return _if(_JUMP_AT_LEAST, parts[middle][0], _tree(parts[middle:]), _tree(parts[:middle]))


def _numbers(machine: str) -> dict[int, bytes]:
    """Number -> instructions, for all system calls that exist in a jail."""
    known = [*range(_END_OF_OWN[machine]), *_COMMON, *_YOUNGER]
    parts = dict.fromkeys(known, _PASS)
    parts |= {number: _refuse(answer(name)) for name, number in denied(machine).items()}
    inspections = _inspections()
    return parts | {number: inspections[name] for name, number in inspected(machine).items()}


@functools.cache
def program(machine: str) -> bytes | None:
    """The filter for a machine as classic BPF, eight bytes an instruction; None for an unknown machine."""
    if machine not in MACHINES:
        return None
    numbers, unknown, kill = _numbers(machine), _refuse(errno.ENOSYS), _instruction(_RETURN, _KILL)
    parts: list[tuple[int, bytes]] = []
    for number in range(max(numbers) + 2):
        part = numbers.get(number, unknown)
        if not parts or parts[-1][1] != part:
            parts.append((number, part))
    if machine == "x86_64":
        parts.append((_X32_BIT, kill))
    return (
        _instruction(_LOAD, _ARCH)
        + _instruction(_JUMP_EQUAL, _ARCHITECTURE[machine], 1, 0)
        + kill
        + _instruction(_LOAD, _NUMBER)
        + _tree(parts)
    )
