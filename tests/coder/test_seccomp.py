"""The filter on every machine it has a table for: its numbers against the kernel's, the program run."""

from __future__ import annotations

import errno
import struct

import pytest
from kernel_headers import HEADERS, read_committed, read_header

from nano_coder.sandbox.launcher import kernel, seccomp

COMMITTED = read_committed()
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_COMMON = 424
"""from here on a system call has one number on every machine"""
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NAMESPACE_FLAGS = (
    kernel.NEWNS, kernel.NEWCGROUP, kernel.NEWUTS, kernel.NEWIPC, kernel.NEWUSER, kernel.NEWPID,
    kernel.NEWNET,
)  # fmt: skip
USUAL = (
    "read", "write", "openat", "close", "execve", "exit_group", "wait4", "futex", "getrandom",
    "pipe2", "kill", "connect", "openat2", "pidfd_open", "close_range", "getxattr", "removexattr",
)  # fmt: skip

CLONE_FILES, VFORK = 0x400, 0x4100
machines = pytest.mark.parametrize("machine", seccomp.MACHINES)


def verdict(program: bytes, machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the kernel would return for a system call: an evaluator of classic BPF."""
    architecture = AUDIT[machine] if arch is None else arch
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    code = list(struct.iter_unpack("=HBBI", program))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, value)
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x54:
                accumulator &= value
            case 0x06:
                return value
            case _:
                raise AssertionError(f"unknown instruction {operation:#x}")


def filter_of(machine: str) -> bytes:
    program = seccomp.program(machine)
    assert program is not None
    return program


def ours(machine: str) -> dict[str, int]:
    return seccomp.inspected(machine) | seccomp.denied(machine)


# ----------------------------------------------------------------------------------------- numbers


def kernel_tables() -> list[tuple[str, dict[str, int]]]:
    """Both tables as committed, and as installed where they are."""
    tables = list(COMMITTED.items())
    return tables + [(machine, read_header(path)) for machine, path in HEADERS.items() if path.exists()]


@pytest.mark.parametrize(("machine", "numbers"), kernel_tables(), ids=lambda value: str(value)[:8])
def test_every_number_is_the_kernels(machine: str, numbers: dict[str, int]) -> None:
    known = {name: number for name, number in ours(machine).items() if name in numbers}
    assert known == {name: numbers[name] for name in known}
    # whatever these headers do not know is younger than they are
    younger = {number for name, number in ours(machine).items() if name not in numbers}
    assert all(number > max(numbers.values()) for number in younger)


@pytest.mark.parametrize(("machine", "numbers"), kernel_tables(), ids=lambda value: str(value)[:8])
def test_what_a_machine_has_no_number_for_does_not_exist_there(machine: str, numbers: dict[str, int]) -> None:
    everywhere = set().union(*(ours(other) for other in seccomp.MACHINES))
    assert (everywhere - set(ours(machine))) & set(numbers) == set()


def test_young_system_calls_have_one_number() -> None:
    x86_64, aarch64 = (ours(machine) for machine in ("x86_64", "aarch64"))
    assert {name: number for name, number in x86_64.items() if number >= FIRST_COMMON} == {
        name: number for name, number in aarch64.items() if number >= FIRST_COMMON
    }


# ----------------------------------------------------------------------------------------- program


@machines
def test_every_denied_system_call_is_refused(machine: str) -> None:
    program = filter_of(machine)
    said = {name: verdict(program, machine, number) for name, number in seccomp.denied(machine).items()}
    assert said == {name: ERRNO | seccomp.answer(name) for name in said}
    assert verdict(program, machine, seccomp.denied(machine)["mount"]) == ERRNO | errno.EPERM


@machines
def test_everything_else_is_allowed(machine: str) -> None:
    program = filter_of(machine)
    # the header names calls of 32-bit machines too, from 403 on
    others = set(COMMITTED[machine].values()) - set(ours(machine).values()) - set(range(403, FIRST_COMMON))
    assert {number for number in others if verdict(program, machine, number) != ALLOW} == set()
    assert {COMMITTED[machine][name] for name in USUAL} <= others


@machines
def test_clone_makes_processes_and_threads_but_no_namespaces(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["clone"]
    sigchld, thread = 17, 0x003D0F00
    assert verdict(program, machine, number, sigchld) == ALLOW
    assert verdict(program, machine, number, thread) == ALLOW
    assert verdict(program, machine, number, VFORK | sigchld) == ALLOW
    # its locks would outlive it, in nobody's name
    assert verdict(program, machine, number, CLONE_FILES | sigchld) == ERRNO | errno.EPERM
    for flag in NAMESPACE_FLAGS:
        assert verdict(program, machine, number, flag | sigchld) == ERRNO | errno.EPERM
    assert verdict(program, machine, COMMITTED[machine]["clone3"]) == ERRNO | errno.ENOSYS


@machines
@pytest.mark.parametrize(("name", "families"), [("socket", {1, 2, 10}), ("socketpair", {1})])
def test_only_common_socket_families_are_allowed(machine: str, name: str, families: set[int]) -> None:
    program, number = filter_of(machine), COMMITTED[machine][name]
    allowed = {family for family in range(64) if verdict(program, machine, number, family, 1) == ALLOW}
    assert allowed == families
    assert verdict(program, machine, number, 40) == ERRNO | errno.EAFNOSUPPORT
    # the kernel reads an int: what is above it does not make another family of it
    assert verdict(program, machine, number, 1 << 32 | 40) == ERRNO | errno.EAFNOSUPPORT


@machines
@pytest.mark.parametrize("family", [2, 10])
def test_internet_sockets_are_tcp_and_udp_only(machine: str, family: int) -> None:
    """UDP-Lite, MPTCP, SCTP, ICMP: the kernel does not tell what is in their buffers."""
    program, number = filter_of(machine), COMMITTED[machine]["socket"]
    flags = (0, 0x80000, 0x800, 0x80800)
    allowed = {
        (kind, protocol)
        for kind in range(16)
        for protocol in range(600)
        if all(verdict(program, machine, number, family, kind | flag, protocol) == ALLOW for flag in flags)
    }
    assert allowed == {(kind, protocol) for kind in (1, 2) for protocol in (0, 6, 17)}


@machines
def test_a_socket_takes_neither_filters_nor_what_the_machine_has_few_of(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["setsockopt"]
    refused = {
        (level, option)
        for level in (0, 1, 6, 17, 41)
        for option in range(128)
        if verdict(program, machine, number, 3, level, option) != ALLOW
    }
    assert refused == {
        *((1, option) for option in (26, 50, 51, 52)), *((6, option) for option in (14, 31, 32, 38)),
        (17, 100), (41, 32),
    }  # fmt: skip
    assert verdict(program, machine, number, 3, 1 << 32 | 1, 1 << 32 | 26) == ERRNO | errno.EPERM


@machines
def test_files_are_locked_in_the_name_of_a_process_only(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["fcntl"]
    refused = {command for command in range(1100) if verdict(program, machine, number, 3, command) != ALLOW}
    assert refused == {37, 38, 1024, 1026, 1031}
    assert verdict(program, machine, number, 3, 6) == ALLOW


@machines
def test_a_process_takes_no_kernel_memory_by_prctl(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["prctl"]
    refused = {option for option in range(200) if verdict(program, machine, number, option) != ALLOW}
    assert refused == {22, *range(78, 200)}
    assert verdict(program, machine, number, 0x53564D41) == ALLOW


@machines
def test_huge_pages_are_the_hosts(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["mmap"]
    private, huge = 0x22, 0x40022
    assert verdict(program, machine, number, 0, 4096, 3, private) == ALLOW
    assert verdict(program, machine, number, 0, 1 << 21, 3, huge) == ERRNO | errno.ENOMEM


@machines
def test_a_system_call_that_is_younger_than_the_list_does_not_exist(machine: str) -> None:
    program, unknown = filter_of(machine), ERRNO | errno.ENOSYS
    younger = {
        "statmount": 457,
        "listmount": 458,
        "setxattrat": 463,
        "open_tree_attr": 467,
        "file_setattr": 469,
    }
    assert {verdict(program, machine, number) for number in (*younger.values(), 500, 1 << 29)} == {unknown}
    assert {n for n in range(451, 2000) if verdict(program, machine, n) == ALLOW} == {452, 453, 462}
    assert {verdict(program, machine, n) for n in range(340, 424)} == {unknown}


@machines
def test_a_terminal_can_be_asked_but_not_typed_into(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["ioctl"]
    ask_size, type_a_key, paste, change_discipline = 0x5413, 0x5412, 0x541C, 0x5423
    assert verdict(program, machine, number, 0, ask_size) == ALLOW
    assert verdict(program, machine, number, 0, type_a_key) == ERRNO | errno.EPERM
    assert verdict(program, machine, number, 0, paste) == ERRNO | errno.EPERM
    assert verdict(program, machine, number, 0, change_discipline) == ERRNO | errno.EPERM
    assert verdict(program, machine, number, 0, 1 << 32 | type_a_key) == ERRNO | errno.EPERM


@machines
def test_a_process_limits_itself_only(machine: str) -> None:
    program, number = filter_of(machine), COMMITTED[machine]["prlimit64"]
    assert verdict(program, machine, number, 0) == ALLOW
    assert verdict(program, machine, number, 1) == ERRNO | errno.EPERM


@pytest.mark.some(2)
@machines
@pytest.mark.parametrize("arch", [0x40000003, 0x40000028, 0xC000003E, 0xC00000B7, 0])
def test_another_architecture_is_killed(machine: str, arch: int) -> None:
    expected = ALLOW if arch == AUDIT[machine] else KILL
    assert verdict(filter_of(machine), machine, COMMITTED[machine]["read"], arch=arch) == expected


def test_x32_is_killed_where_it_exists() -> None:
    assert verdict(filter_of("x86_64"), "x86_64", 0x40000000) == KILL


def test_a_machine_without_a_table_has_no_filter() -> None:
    assert seccomp.program("riscv64") is None
