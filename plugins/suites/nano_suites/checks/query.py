"""Runs one SELECT on an untrusted database: the program that runs in the jail. Standard library only."""

from __future__ import annotations

import json
import sqlite3
import sys
from typing import Any

MOST_ROWS = 100_000
MOST_STEPS = 200
"""each of a million virtual machine instructions"""
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)


def only_reading(action: int, *_names: Any) -> int:
    return sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY


def plain(value: Any) -> Any:
    return {"blob": value.hex()} if isinstance(value, bytes) else value


def rows(path: str, query: str) -> list[list[Any]]:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")
    connection.execute("PRAGMA mmap_size=0")
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.set_authorizer(only_reading)
    steps = iter(range(MOST_STEPS))
    connection.set_progress_handler(lambda: next(steps, None) is None, 1_000_000)
    found = connection.execute(query).fetchmany(MOST_ROWS + 1)
    if len(found) > MOST_ROWS:
        raise sqlite3.DataError("too many rows")
    return [[plain(value) for value in row] for row in found]


def main() -> None:
    job = json.load(sys.stdin)
    try:
        report: dict[str, Any] = {"rows": rows(job["path"], job["query"])}
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError) as problem:
        report = {"problem": f"{type(problem).__name__}: {problem}"}
    print(json.dumps(report))


main()
