"""Memory that a large tensor leaves is used by the next one, without a page fault."""

from __future__ import annotations

import subprocess
import sys

FAULTS = """
import resource, sys, torch
from nano_shared.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    return float((torch.ones(20_000_000) + 1)[-1])
for _ in range(8): work()
before = faults()
for _ in range(3): work()
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_large_tensor_is_made_where_the_last_one_was() -> None:
    assert faults("kept") < faults("plain") / 10
