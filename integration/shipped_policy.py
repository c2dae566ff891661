"""The recipe of the shipped policy: tasks, oracle runs, `nano-rl sft`, and the checkpoint into the package.

    python integration/shipped_policy.py

About an hour on two cores. It can be stopped and started again: oracle runs are read back from the log, and
the training goes on from its last saved state. Program families of the test split are absent throughout.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from nano_rl.tasks import make_tasks, write_tasks
from nano_shared.checkpoint import checkpoints_dir
from nano_shared.home import nano_home
from nano_shared.types import Split

SHIPPED = Path(__file__).parents[1] / "nano_coder" / "shipped"
MIX = {
    "copy": 160,
    "emit": 240,
    "calculate": 200,
    "predict": 200,
    "complete": 400,
    "fix": 1100,
    "repair": 1200,
    "body": 500,
}
"""view -> tasks"""
SFT = {
    "--epochs": "1",
    "--batch": "16",
    "--learning-rate": "1e-3",
    "--lora-rank": "16",
    "--max-tokens": "1500",
    "--dtype": "bfloat16",
}
NAME = "shipped-2"


def main() -> int:
    tasks = [
        task
        for view, n in MIX.items()
        for task in make_tasks(levels=range(4), n=n, seed=7, split=Split.TRAIN, views=[view])
    ]
    file = nano_home() / "shipped-tasks.jsonl"
    write_tasks(file, tasks)
    nano_rl = str(Path(sys.executable).parent / "nano-rl")
    flags = [part for pair in SFT.items() for part in pair]
    base = ["--model", "smollm2-135m-instruct", "--tasks", str(file), "--name", NAME]
    done = subprocess.run([nano_rl, "sft", *base, *flags], check=False)
    if done.returncode == 0:
        shutil.rmtree(SHIPPED, ignore_errors=True)
        shutil.copytree(checkpoints_dir() / NAME, SHIPPED)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
