"""What two quiet mistakes do to the gradient of a step, before any training has averaged it out.

The starting policies of `objectives.py` run tasks of levels 1 and 2 many times. Most runs of a task give the
gradient that a step is after; eight runs of each of eight tasks are a step, which is made three times: as the
trainer makes it, with groups mixed over tasks, and with every token trained. How well each points where it
should is the cosine between the two gradients.

    python integration/control_gradients.py --out FOLDER --seeds 0 1 2    or the folder of objectives.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import mean

import torch
from log_arms import GROUP, Bench
from negative_controls import mask_off, wrong_groups
from objectives import PROMPTS, SCALE
from torch import Tensor, nn

from nano_coder.runtime import open_weights
from nano_rl.batch import Batch
from nano_rl.checkpoints.statistics import bootstrap
from nano_rl.config import GuardConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from nano_rl.group import Group
from nano_rl.model.learner import Guard, Learner, Objective, prepare
from nano_rl.rollout import collect
from nano_rl.update import Updater
from nano_shared.store import LogStore

BLOCKS, STEPS, REFERENCE = 6, 2, 48
"""sets of tasks, steps made of each, and runs of a task that say what its gradient is"""
MADE: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as it is": nullcontext, "wrong-group": wrong_groups, "mask-off": mask_off,
}  # fmt: skip


class Still(Learner):
    """Keeps the gradient of an update, and updates nothing."""

    gradient: Tensor

    def update(
        self, batches: Sequence[Batch], objective: Objective, guard: Guard, *, ends_step: bool = True
    ) -> dict[str, float]:
        for batch in batches:
            objective(self.model, batch)[0].backward()
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        self.gradient = torch.cat(gradients).clone()
        self.model.zero_grad(set_to_none=True)
        return {}


class Gradients:
    """The gradients that a policy gets from groups."""

    def __init__(self, model: nn.Module) -> None:
        # the sampler gave no log-prob for what it was shown, so no importance weights: as in `mask_off`
        config = TrainConfig(
            objective=ObjectiveConfig(objective="grpo", tis_cap=None),
            guards=GuardConfig(patience=10**6, mismatch_max=1e9),
            optimizer=OptimizerConfig(learning_rate=1e-9),
        )
        self._learner = Still(model, config.optimizer, steps=1)
        self._updater = Updater(learner=self._learner, config=config)

    def of(self, groups: Sequence[Group], made: str) -> Tensor | None:
        """[parameters]; None where no group has a signal."""
        with MADE[made]():
            learned = self._updater.learn(groups, {}, version=0)
        return None if learned["skipped"] else self._learner.gradient


def cosines(bench: Bench) -> Iterator[dict[str, float]]:
    """Of each step and way of making it: the cosine with the gradient that it is after."""
    warm = bench.warm()
    opened = open_weights(str(warm))
    gradients = Gradients(prepare(opened.loaded.model, lora_rank=0, seed=bench.seed))
    tasks = bench.tasks.train[bench.scale.oracles :]
    runs = STEPS * GROUP + REFERENCE
    with LogStore.open(bench.home / "control-gradients.db") as store:
        for block in range(BLOCKS):
            chosen = tasks[block * PROMPTS :][:PROMPTS]
            made = collect(chosen, bench.runtime(warm, store), group_size=runs, seed=block)
            of_task = [made[i * runs :][:runs] for i in range(len(chosen))]

            def groups(start: int, count: int, of_task: list = of_task) -> list[Group]:  # type: ignore[type-arg]
                return [
                    Group(task_key=of[0].group_key, trajectories=tuple(of[start : start + count]))
                    for of in of_task
                ]

            true = gradients.of(groups(STEPS * GROUP, REFERENCE), "as it is")
            for step in range(STEPS):
                found = {name: gradients.of(groups(step * GROUP, GROUP), name) for name in MADE}
                if true is not None and all(one is not None for one in found.values()):
                    yield {
                        name: float(torch.cosine_similarity(one, true, dim=0))
                        for name, one in found.items()
                        if one is not None
                    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What quiet mistakes do to the gradient of a step.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(arguments)
    rows = []
    for seed in options.seeds:
        for row in cosines(Bench(options.out / f"seed-{seed}", SCALE, seed=seed)):
            print(seed, "  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
            rows.append(row)
    right = [row["as it is"] for row in rows]
    for name in MADE:
        cosine = [row[name] for row in rows]
        less, low, high = bootstrap([[a - b] for a, b in zip(cosine, right, strict=True)], seed=0)
        print(f"{name}: {mean(cosine):.3f} ({less:+.3f}, 95 % {low:+.3f} to {high:+.3f}; {len(rows)} steps)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
