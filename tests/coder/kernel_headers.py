"""The kernel's numbers of system calls: from its headers (Debian's linux-libc-dev), and as committed."""

from __future__ import annotations

import re
from pathlib import Path

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
COMMITTED = Path(__file__).with_name("syscalls.csv")
_DEFINITION = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)")
_NO_CALLS = {"syscalls", "arch_specific_syscall"}
_COMMAND = "python tests/coder/kernel_headers.py > tests/coder/syscalls.csv"


def read_header(path: Path) -> dict[str, int]:
    found = (_DEFINITION.match(line) for line in path.read_text().splitlines())
    return {match[1]: int(match[2]) for match in found if match and match[1] not in _NO_CALLS}


def read_committed() -> dict[str, dict[str, int]]:
    """Machine -> name -> number, as they were when the file was made."""
    _, header, *rows = COMMITTED.read_text().splitlines()
    numbers: dict[str, dict[str, int]] = {machine: {} for machine in header.split(",")[1:]}
    for row in rows:
        name, *columns = row.split(",")
        for machine, number in zip(numbers, columns, strict=True):
            if number:
                numbers[machine][name] = int(number)
    return numbers


def main() -> None:
    tables = [read_header(path) for path in HEADERS.values()]
    print(f"# made by: {_COMMAND}")
    print(",".join(["name", *HEADERS]))
    for name in sorted(set().union(*tables)):
        print(",".join([name, *(str(table.get(name, "")) for table in tables)]))


if __name__ == "__main__":
    main()
