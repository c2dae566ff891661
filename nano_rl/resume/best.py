"""The best saved state of a training, made into a checkpoint that serves."""

from __future__ import annotations

from pathlib import Path

from nano_coder.models.opening import open_weights
from nano_rl.checkpoints.checkpoint import save_checkpoint
from nano_rl.config.training import TrainConfig, parse_config
from nano_rl.learn.model.learner import prepare, restore_weights
from nano_rl.logs.used_runs import USED, read_used
from nano_rl.resume.states import STATES, States
from nano_shared.checkpoint import Manifest
from nano_shared.errors import CheckpointError
from nano_shared.store import LogStore


def save_best(training: Path, target: Path, store: LogStore) -> Manifest:
    """Write checkpoint `target` from the state whose fresh rollouts earned most, or else the newest one.

    `training` is the folder of a training, finished or stopped; `store` the log it wrote. Raises
    CheckpointError where no state is saved, where one is damaged, and where its model has changed since.
    """
    states = States(training / STATES)
    steps = states.steps()
    if not steps:
        raise CheckpointError(f"no training has saved a state under {training}; nano-rl train makes one")
    best = states.read(steps[-1])[1]["best"]
    step = int(best["step"]) if best and best["step"] in steps else steps[-1]
    manifest, tree = states.read(step)
    told = manifest.identity
    config = parse_config(TrainConfig, told.config)
    opened = open_weights(told.model_name, dtype=config.dtype, merge=False)
    if opened.loaded.id != told.model:
        raise CheckpointError(
            f"{training} began from other weights than {told.model_name} names now; put those back"
        )
    model = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    restore_weights(model, tree["learner"]["weights"])
    groups = [group for line in read_used(training / USED)[:step] for group in line["groups"]]
    first_runs = {group["task"]: group["runs"][0] for group in groups}
    return save_checkpoint(
        target, model, opened, parent=told.model_name, config=config, steps=step,
        run_ids=[run for group in groups for run in group["runs"]],
        tasks=[store.get(run).task for run in first_runs.values()],
        metrics={"reward_mean": best["reward"]} if best and best["step"] == step else {},
    )  # fmt: skip
