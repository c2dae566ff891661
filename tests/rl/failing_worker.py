"""A rollout worker that comes to grief: after its first run of step 1 it sends itself a signal.

The file that FAILURES names says which signal, and how many workers it still befalls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano_coder.run.execution import Runtime
from nano_rl.gather import rollout_worker
from nano_rl.gather import rollouts as rollout
from nano_shared.types import Task, Trajectory

FAILURES = "NANO_TEST_FAILURES"
_collect = rollout.collect


def collect(tasks: Sequence[Task], runtime: Runtime, **settings: Any) -> list[Trajectory]:
    def on_run(_: Trajectory) -> None:
        file = Path(os.environ[FAILURES])
        number, left = map(int, file.read_text().split())
        if settings["seed"] == 1 and left:
            file.write_text(f"{number} {left - 1}")
            os.kill(os.getpid(), number)

    return _collect(tasks, runtime, on_run=on_run, **settings)


if __name__ == "__main__":
    rollout.collect = collect
    rollout_worker.main(Path(sys.argv[1]))
