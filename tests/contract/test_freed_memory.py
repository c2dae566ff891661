"""What is freed and kept is given back when it is much, and only then; in processes of their own."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from pathlib import Path
from nano_shared.process import keep_freed_memory, return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

keep_freed_memory()
held = [bytearray(1 << 20) for _ in range(400)]
last = bytearray(1 << 20)  # stands behind them, so that the top of the heap cannot simply be lowered
del held
freed = resident()
return_freed_memory(int(sys.argv[1]) << 20)
print(freed, resident())
"""


def resident_before_and_after(keep_mb: int) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(keep_mb)], capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    return before, after


def test_more_than_is_to_be_kept_is_given_back() -> None:
    before, after = resident_before_and_after(100)
    assert before > 400
    assert after < 200


def test_less_stays_to_be_used_again() -> None:
    before, after = resident_before_and_after(1000)
    assert before > 400
    assert abs(after - before) < 50
