"""The trainings of a cycle: imitation of what solved the training tasks, then policy gradients on them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nano_coder.models.opening import dtype_to_train, open_weights, rank_of
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.command_setup import oracle_runtime, training_folder, training_runtime, trainings_dir
from nano_rl.config import SftConfig, TrainConfig
from nano_rl.gather.step_groups import Sources
from nano_rl.imitation import all_that_fit, reader_of, solved_oracles, train_sft
from nano_rl.improve.project import Tell
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.resume import STATES
from nano_rl.train import train
from nano_rl.train_fixed_rows import OtherRows
from nano_rl.training_record import TrainArguments, Watch
from nano_shared.errors import GuardTripped
from nano_shared.types import Task, Trajectory

if TYPE_CHECKING:
    from nano_coder.config import AgentConfig

RANK = 16
"""of a new adapter; that of an adapter which is trained on stays"""
SMALL, RATE_SMALL, RATE = 500_000_000, 1e-3, 3e-4
"""number of weights below which imitation learns at the first rate, and from which at the second"""
_SEEN, _MOST_EPOCHS, _BATCH = 500, 6, 8
"""rows that imitation sees in all, passes over them at most, and rows of a step"""
_AT_ONCE = 16
"""solutions that are run between two looks at the time"""
POLICY_GRADIENT_RATE = 3e-5
_MOST_STEPS = 400


def imitate(
    name: str, parent: str, tasks: Sequence[Task], config: AgentConfig, until: float, say: Tell
) -> bool:
    """Imitate the solutions of tasks until `time.monotonic` is `until`, and write checkpoint
    `name`; False where no solution fits the policy. A training of that name that was killed goes on.
    Solutions are run for half of the time at most, the first tasks first."""
    half = (time.monotonic() + until) / 2
    target, folder = training_folder(name)
    oracles = oracle_runtime(config.log, config)
    dtype = dtype_to_train(parent, config.device)
    opened = open_weights(parent, dtype=dtype, device=config.device, profile=config.profile)
    say(f"running the solutions of {len(tasks)} training tasks")
    solvable, runs = [task for task in tasks if task.oracle], list[Trajectory]()
    for some in (solvable[at : at + _AT_ONCE] for at in range(0, len(solvable), _AT_ONCE)):
        if not runs or time.monotonic() < half:
            runs += solved_oracles(some, replace(oracles, profile=opened.profile))
    reader = reader_of(opened)
    found = all_that_fit(runs, lambda run: reader.rows(run, oracles.store.blobs))
    rows = [row for rows_of_run in found for row in rows_of_run]
    if not rows:
        return False
    say(f"imitating {len(rows)} solutions of {len(tasks)} training tasks")
    rank = rank_of(parent) or RANK
    size = sum(weight.numel() for weight in opened.loaded.model.parameters())
    rate = RATE_SMALL if size < SMALL else RATE
    learning = SftConfig(
        lora_rank=rank, dtype=dtype, save_every=5, batch=_BATCH,
        epochs=min(_MOST_EPOCHS, max(1.0, _SEEN / len(rows))),
        optimizer=OptimizerConfig(learning_rate=rate, schedule="linear", warmup_steps=2),
    )  # fmt: skip
    trained = prepare(opened.loaded.model, lora_rank=rank, seed=learning.seed)

    def on_step(done: int, total: int, values: dict[str, float]) -> None:
        say(f"imitation: step {done} of {total}, loss {values['loss']:.3f}")

    try:
        steps = train_sft(trained, rows, learning, folder, on_step, until=until)
    except OtherRows:  # it was killed, and other rows are found now
        shutil.rmtree(folder / STATES)
        steps = train_sft(trained, rows, learning, folder, on_step, until=until)
    save_checkpoint(
        target, trained, opened, parent=parent, config=learning,
        learned=Learned(steps=steps, run_ids=[run.id for run in runs], tasks=[run.task for run in runs]),
    )  # fmt: skip
    return True


def reinforce(
    name: str, parent: str, tasks: Sequence[Task], config: AgentConfig, until: float, say: Tell
) -> bool:
    """Policy gradients on fresh rollouts of tasks until `time.monotonic` is `until`, into checkpoint `name`.
    False where a guard ended it before its first step. A training of that name that was killed goes on."""
    target, folder = training_folder(name)
    learning = TrainConfig(
        steps=_MOST_STEPS, prompts_per_step=4, group_size=8, lora_rank=rank_of(parent) or RANK,
        dtype=dtype_to_train(parent, config.device),
        optimizer=OptimizerConfig(learning_rate=POLICY_GRADIENT_RATE),
    )  # fmt: skip
    logs, said = (config.log,) if config.log else (), {"profile": config.profile, "python": config.python}
    more = {key: value for key, value in said.items() if value is not None}
    arguments = TrainArguments(name=name, model=parent, logs=logs, device=config.device, limit=more)
    opened, runtime = training_runtime(arguments, learning)
    trained = prepare(opened.loaded.model, lora_rank=learning.lora_rank, seed=learning.seed)
    steps = 0

    def on_step(done: int, total: int, values: dict[str, float]) -> None:
        nonlocal steps
        steps = done
        signal = 1 - values.get("frac_zero_std", 0.0)
        reward = values["reward_mean"]
        say(f"policy gradients: step {done}, reward {reward:.2f}, {signal:.0%} of the groups with signal")

    watch = Watch(on_step=on_step, enough=lambda: time.monotonic() > until)
    used: Sequence[str] = ()
    try:
        used = train(trained, opened, runtime, Sources(tasks=tuple(tasks)), learning, folder, watch)
    except GuardTripped as problem:
        say(f"policy gradients stopped: {problem}")
    if not steps:
        return False
    save_checkpoint(
        target, trained, opened, parent=parent, config=learning,
        learned=Learned(steps=steps, run_ids=used, tasks=tasks),
    )  # fmt: skip
    return True


def trained_seconds(names: Iterable[str]) -> float:
    """Time of the steps of trainings, in all processes that took part in them."""
    files = [file for name in names if (file := trainings_dir() / name / METRICS).exists()]
    rows = [row for file in files for row in read_metrics(file)]
    return sum(row.get("seconds") or row.get("step_time") or 0.0 for row in rows)
