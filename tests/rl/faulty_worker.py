"""A rollout worker with a fault, which the variable FAULT names; it is started in place of the real one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nano_coder.run.execution import Runtime
from nano_rl.gather import rollout_worker
from nano_rl.gather import rollouts as rollout
from nano_rl.learn.model import learner
from nano_shared.types import Task, Trajectory

FAULT = "NANO_TEST_FAULT"
_restore, _collect = learner.restore_weights, rollout.collect
_models: list[nn.Module] = []


def restore_once(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Weights of later requests are read and not taken."""
    if os.environ[FAULT] != "serves older weights" or not _models:
        _restore(model, weights)
    _models.append(model)


def collect(tasks: Sequence[Task], runtime: Runtime, **settings: Any) -> list[Trajectory]:
    """Rollouts of a moved policy, which is put back before anybody asks."""
    kept = {name: p.detach().clone() for name, p in _models[-1].named_parameters()}
    with torch.no_grad():
        if os.environ[FAULT] == "moves while it samples" and settings["seed"] == 1:
            for parameter in _models[-1].parameters():
                parameter.mul_(1.01)
    runs = _collect(tasks, runtime, **settings)
    if os.environ[FAULT] == "moves after it sampled" and settings["seed"] == 1:
        kept = {name: 1.01 * value for name, value in kept.items()}
    with torch.no_grad():
        for name, parameter in _models[-1].named_parameters():
            parameter.copy_(kept[name])
    return runs


if __name__ == "__main__":
    learner.restore_weights = restore_once
    rollout.collect = collect
    rollout_worker.main(Path(sys.argv[1]))
