"""Memory that a large tensor leaves stays with the process, and the next one is made there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

WORK = """
import json, sys, torch
from pathlib import Path
from nano_shared.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
    keep_freed_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
def place():
    return torch.ones(20_000_000).data_ptr()
before = resident()
places = [place() for _ in range(30)]
print(json.dumps({"places": places, "megabytes": resident() - before}))
"""


def work(how: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", WORK, how], capture_output=True, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
def test_a_large_tensor_is_made_where_the_last_one_was() -> None:
    kept, plain = work("kept"), work("plain")
    assert set(kept["places"][15:]) <= set(kept["places"][:15])
    assert (kept["megabytes"] > 60, plain["megabytes"] > 60) == (True, False)
