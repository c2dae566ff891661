"""What drafts are worth: the same agents with and without them, in turn, in one process.

    python benchmarks/drafts.py [--model shipped] [--tasks 12] [--group 1] [--at-once 1] [--rounds 3]

Generated tasks of levels 1 and 2, a real sandbox, a log of their own. Prints, for each side, the decoding
steps of a round, the seconds in the engine and in all, and the tokens sampled; the first round warms up.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from nano_coder.models.local import continuous_batching as continuous
from nano_coder.models.local import continuous_batching as speculative
from nano_coder.models.local.engine import Engine
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.run.execution import RunSettings, Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.gather.rollouts import collect
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split
from nano_suites.drawing import make_tasks


@dataclass
class Side:
    budget: int
    """tokens of a step with drafts"""
    steps: list[int] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    opened = open_weights(options.model, dtype="bfloat16")
    tasks = make_tasks(
        levels=[1, 2], n=options.tasks, seed=22, split=Split.TEST, views=["complete", "fix", "repair"]
    )
    seconds, steps = [0.0], [0]
    _count(Engine, "step", seconds)
    _count(continuous.ContinuousDecoder, "_decode", [0.0], steps)
    sides = {"with drafts": Side(speculative._STEP_TOKENS), "without": Side(0)}
    for lap in range(options.rounds + 1):
        for side in sides.values():
            speculative._STEP_TOKENS = side.budget
            seconds[0], steps[0] = 0.0, 0
            with tempfile.TemporaryDirectory() as folder, LogStore.open(Path(folder) / "log.db") as store:
                runtime = Runtime(
                    policy=local_policy(opened.loaded, opened.profile),
                    sandbox=open_sandbox(),
                    store=store,
                    profile=opened.profile,
                    sampling=Sampling(temperature=1.0),
                    settings=RunSettings(at_once=options.at_once),
                )
                began = time.perf_counter()
                runs = collect(tasks, runtime, group_size=options.group, seed=lap)
                took = time.perf_counter() - began
            if lap:
                side.wall.append(took)
                side.engine.append(seconds[0])
                side.steps.append(steps[0])
                side.tokens.append(sum(_sampled(turn) for run in runs for turn in run.turns))
    plain = sides["without"]
    for name, side in sides.items():
        print(
            f"{name:12} {median(side.steps):6.0f} steps, engine {median(side.engine):6.1f} s"
            f" ({median(plain.engine) / median(side.engine):.2f} x), all {median(side.wall):6.1f} s"
            f" ({median(plain.wall) / median(side.wall):.2f} x), {median(side.tokens):.0f} tokens",
            flush=True,
        )


def _sampled(turn: Any) -> int:
    return len(turn.completion.tokens.sampled_ids)


def _count(kind: type, name: str, seconds: list[float], calls: list[int] | None = None) -> None:
    inner = getattr(kind, name)

    def timed(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args, **options)
        finally:
            seconds[0] += time.perf_counter() - began
            if calls is not None:
                calls[0] += 1

    setattr(kind, name, timed)


if __name__ == "__main__":
    main()
