"""The recipe of the shipped policy: tasks, oracle runs, `nano-rl sft` in two stages, and into the package.

    python integration/shipped_policy.py

Under two hours on two cores. It can be stopped and started again: oracle runs are read back from the log, and
a training goes on from its last saved state. Neither the families nor the code of the test split occur.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from smoke import parse

from integration.tiny_model import build_tiny
from nano_rl.tasks.task_file import write_tasks
from nano_shared.files import checkpoints_dir, nano_home
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

SHIPPED = Path(__file__).parents[1] / "nano_coder" / "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    parent: str
    mix: dict[tuple[str, ...], int]
    """views -> tasks"""
    seed: int
    learning_rate: float
    epochs: float

    def tasks(self) -> list[Task]:
        return [
            task
            for views, n in self.mix.items()
            for task in make_tasks(levels=range(4), n=n, seed=self.seed, split=Split.TRAIN, views=views)
        ]


STAGES = (
    Stage(
        name="shipped-2",
        parent="smollm2-135m-instruct",
        mix={
            ("copy",): 160, ("emit",): 240, ("calculate",): 200, ("predict",): 200, ("complete",): 400,
            ("fix",): 1100, ("repair",): 1200, ("body",): 500,
        },
        seed=7,
        learning_rate=1e-3,
        epochs=1,
    ),
    Stage(
        name="shipped-3",
        parent="shipped-2",
        mix={
            ("repair",): 1000, ("fix",): 240, ("body",): 80,
            ("copy",): 20, ("emit",): 20, ("calculate",): 30, ("predict",): 40, ("complete",): 90,
        },
        seed=11,
        learning_rate=1e-3,
        epochs=1,
    ),
)  # fmt: skip


def main() -> int:
    options = parse(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    nano_rl = Path(sys.executable).parent / "nano-rl"
    stages: tuple[Stage, ...] = STAGES
    if options.smoke:
        tiny = build_tiny(nano_home() / "tiny", ["You are a coding agent."], hidden=32, layers=1)
        stages = (replace(STAGES[0], name="smoke", parent=str(tiny), mix={("copy",): 2}),)
    for stage in stages:
        if (checkpoints_dir() / stage.name).exists():
            continue
        file = nano_home() / f"{stage.name}-tasks.jsonl"
        write_tasks(file, stage.tasks())
        flags = (
            f"--model {stage.parent} --name {stage.name} --learning-rate {stage.learning_rate}"
            f" --epochs {stage.epochs} --lora-rank 16"
            " --set batch=16 --set max_tokens=1500 --set dtype=bfloat16"
        )
        done = subprocess.run([nano_rl, "sft", "--tasks", file, *flags.split()], check=False)
        if done.returncode:
            return done.returncode
    if options.smoke:
        return 0
    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.copytree(checkpoints_dir() / STAGES[-1].name, SHIPPED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
