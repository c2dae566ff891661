"""What seeded tiny trainings end in, to the byte: guards, and what is moved in the trainer, only look.

A change of the maths, or of what is drawn and in which order, changes these hashes: it is meant, and its
commit says so, or it is a mistake. `python tests/rl/training_bytes.py` prints those to record.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TORCH = "2.13.0"
RECORDED = {
    "grpo": "93c2cf5f4b3977f0",
    "gspo, an adapter": "b0f04a174b3fc78a",
    "ppo": "bb2eb2e52048d52b",
    "overlap": "06cc29badb579f10",
    "from logs": "d7258f9f93fa2e91",
    "sft": "842291b40127a54e",
    "dpo": "9f3119aad1a3460e",
}


@pytest.mark.skipif(
    platform.machine() != "x86_64" or torch.__version__.partition("+")[0] != TORCH,
    reason=f"recorded with torch {TORCH} on x86_64",
)
def test_seeded_trainings_end_in_the_recorded_bytes() -> None:
    script = Path(__file__).with_name("training_bytes.py")
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout) == RECORDED
