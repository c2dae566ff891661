"""How far a training is: everything that going on needs, gathered into one state and put back from it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from nano_rl.gather.sources import Gatherer, Sources
from nano_rl.learn.model.learner import Learner
from nano_rl.resume.identity import Identity, difference
from nano_rl.resume.states import States
from nano_shared.errors import CheckpointError, UsageError


def seed_all(seed: int) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The state of those generators, as a tree (`tensor_tree`)."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Go on from `random_state()`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))


class Progress:
    """The moving parts of a training and what the steps so far have shown.

    Groups that were rolled out and not yet learned from are no part of it: under lockstep the seed, the
    weights and the place in the order of tasks roll them out again as they were. Which logged runs were taken
    is part of it, and so is what the log held when the training began.
    """

    def __init__(
        self, learner: Learner, gatherer: Gatherer, sources: Sources, states: States, identity: Identity
    ) -> None:
        self.history: list[dict[str, float]] = []
        """metrics of the last steps, which the guards look back on"""
        self.best: dict[str, float] | None = None
        """`step`, `level` and `reward` of the saved weights whose fresh rollouts earned most"""
        self._learner, self._gatherer, self._sources = learner, gatherer, sources
        self._states, self._identity = states, identity
        self._saved: int | None = None

    def judge(self, values: Mapping[str, float], *, behind: int = 0) -> None:
        """Note whether the weights that sampled this step's groups, `behind` steps ago, are the best that are
        saved.

        A higher level of the curriculum counts before the reward; among equals the later weights win.
        """
        step, reward = self._learner.step - behind, values.get("reward_mean")
        if reward is None or self._sources.from_logs or step not in self._states.steps():
            return
        curriculum = self._sources.curriculum
        level = float(curriculum.open_level) if curriculum else 0.0
        if self.best is None or (level, reward) >= (self.best["level"], self.best["reward"]):
            self.best = {"step": step, "level": level, "reward": reward}

    def note(self, values: dict[str, float], patience: int) -> None:
        """Remember the metrics of a step as long as a guard may look back."""
        self.history = [*self.history, values][-patience:]

    def save(self) -> None:
        """Begin to write the state, unless it is the last one written; the weights rest until `States.join`.

        Raises CheckpointError where the one before could not be written.
        """
        if self._saved == self._learner.step:
            return
        self._saved = self._learner.step
        tree = {
            "learner": self._learner.state(),
            "gatherer": self._gatherer.state(),
            "logged": self._sources.logged_runs(),
            "history": list(self.history),
            "best": self.best,
            "random": random_state(),
        }
        best = int(self.best["step"]) if self.best else None
        self._states.save(self._learner.step, tree, self._identity, best=best)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from a saved tree. Raises CheckpointError where it is of another model."""
        self._learner.restore(saved["learner"])
        self._saved = self._learner.step
        self._gatherer.restore(saved["gatherer"])
        self.history, self.best = saved["history"], saved["best"]
        restore_random(saved["random"])


def saved_progress(states: States, identity: Identity, *, resume: bool) -> dict[str, Any] | None:
    """The tree of the newest state; None where there is none and none is required.

    Raises UsageError where `resume` finds nothing, CheckpointError for a state that is damaged, or whose
    training was of another model, other tasks or other settings.
    """
    steps = states.steps()
    if not steps:
        if resume:
            raise UsageError(
                "there is nothing to resume: no state is saved under this --name; leave --resume out to start"
            )
        return None
    manifest, tree = states.read(steps[-1])
    differs = difference(manifest.identity, identity, resume=resume)
    if differs:
        raise CheckpointError(f"the training of this --name, saved at step {manifest.step}, {differs}")
    saved: dict[str, Any] = tree
    return saved
