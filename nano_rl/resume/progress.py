"""The progress of a training as one state, its end by a signal, and the best saved state as a checkpoint."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from nano_coder.models.opening import open_weights
from nano_rl.checkpoints.checkpoint import save_checkpoint
from nano_rl.config.training import TrainConfig, saved_settings
from nano_rl.gather.sources import Gatherer, Sources
from nano_rl.learn.model.learner import Learner, prepare, restore_weights
from nano_rl.logs.used_runs import USED, read_used
from nano_rl.resume.states import STATES, Identity, States, difference, edited
from nano_shared.checkpoint import Manifest
from nano_shared.errors import CheckpointError, NanoError, UsageError
from nano_shared.extensions import leave_hanging_calls
from nano_shared.settings import parse_config
from nano_shared.store import LogStore

GRACE_SECONDS = 2.0
"""seconds after the second signal to close jails and connections; then the process exits"""
INTERRUPTED = 130


class TrainingStopped(NanoError):
    """Training stopped by a signal, after its current step was finished and saved."""

    exit_code = INTERRUPTED


class Interrupt:
    """The handler of SIGINT and SIGTERM; `requested` is True after the first signal."""

    def __init__(self) -> None:
        self.requested = False
        self._end: threading.Timer | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            # not print: the signal may interrupt another print
            os.write(2, b"\nfinishing this step, then saving; once more to stop at once\n")
            leave_hanging_calls(number)
            return
        # running rollouts may take minutes; states and log are written atomically, so that this is safe
        self._end = threading.Timer(GRACE_SECONDS, _end)
        self._end.daemon = True
        self._end.start()
        raise KeyboardInterrupt

    def forget(self) -> None:
        if self._end is not None:
            self._end.cancel()


def _end() -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a progress bar hides the cursor
    os._exit(INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Handle SIGINT and SIGTERM until the block ends; outside the main thread do nothing."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupt.forget()


def save_best(training: Path, target: Path, store: LogStore) -> Manifest:
    """Write checkpoint `target` from the best saved state (`Progress.best`), or else from the newest one.

    `training` is the folder of a finished or stopped training, `store` its log. Raises CheckpointError if no
    state is saved, if it is damaged, and if the weights of its model have changed since.
    """
    states = States(training / STATES)
    steps = states.steps()
    if not steps:
        raise CheckpointError(f"no training has saved a state under {training}; nano-rl train makes one")
    best = states.read(steps[-1])[1]["best"]
    step = int(best["step"]) if best and best["step"] in steps else steps[-1]
    manifest, tree = states.read(step)
    identity = manifest.identity
    config = parse_config(TrainConfig, saved_settings(identity.config))
    opened = open_weights(identity.model_name, dtype=config.dtype)
    if opened.loaded.id != identity.model:
        raise CheckpointError(
            f"{training} began from other weights than {identity.model_name} names now; put those back"
        )
    model = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    restore_weights(model, tree["learner"]["weights"])
    groups = [group for line in read_used(training / USED)[:step] for group in line["groups"]]
    first_runs = {group["task"]: group["runs"][0] for group in groups}
    return save_checkpoint(
        target, model, opened, parent=identity.model_name, config=config, steps=step,
        run_ids=[run for group in groups for run in group["runs"]],
        tasks=[store.get(run).task for run in first_runs.values()],
        metrics={"reward_mean": best["reward"]} if best and best["step"] == step else {},
    )  # fmt: skip


def seed_all(seed: int) -> None:
    """Seed the global random generators of Python, torch and, if loaded, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The state of those generators, as a tree (`states.save_tree`)."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
    return state


def restore_random(state: dict[str, Any]) -> None:
    """Restore the state of `random_state()`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))


def usual_save_every(model: torch.nn.Module) -> int:
    """Steps between saved states where none are said: 1, and one more for each 2 GiB of a state, which is the
    trained weights with two moments each, in float32."""
    return 1 + sum(12 * weight.numel() for weight in model.parameters() if weight.requires_grad) // (2 << 30)


class Progress:
    """The state of a training: learner, gatherer, logged runs, metrics of the last steps, and the best step.

    Rollouts that were not yet learned from are not saved: under lockstep the same seed, weights and task
    order give the same rollouts again. The runs that the log had at the start, and those taken from it, are
    saved by id.
    """

    def __init__(
        self, learner: Learner, gatherer: Gatherer, sources: Sources, states: States, identity: Identity
    ) -> None:
        self.history: list[dict[str, float]] = []
        """metrics of the last steps, for the guards"""
        self.best: dict[str, float] | None = None
        """`step`, `level` and `reward` of the saved weights with the highest reward of fresh rollouts"""
        self._learner, self._gatherer, self._sources = learner, gatherer, sources
        self._states, self._identity = states, identity
        self._saved: int | None = None

    def judge(self, values: Mapping[str, float], *, off_policy_steps: int = 0) -> None:
        """Update `best` if the weights that sampled this step's groups, `off_policy_steps` ago, are saved.

        Compared by the level of the curriculum, then by the mean reward; later weights win ties.
        """
        step, reward = self._learner.step - off_policy_steps, values.get("reward_mean")
        if reward is None or self._sources.from_logs or step not in self._states.steps():
            return
        curriculum = self._sources.curriculum
        level = float(curriculum.open_level) if curriculum else 0.0
        if self.best is None or (level, reward) >= (self.best["level"], self.best["reward"]):
            self.best = {"step": step, "level": level, "reward": reward}

    def note(self, values: dict[str, float], patience: int) -> None:
        """Append the metrics of a step to `history`, which keeps the last `patience` steps."""
        self.history = [*self.history, values][-patience:]

    def save(self) -> None:
        """Start writing the state, unless it is saved already; the weights must not change until
        `States.join`.

        Raises CheckpointError if the previous state could not be written.
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
        """Continue from a saved tree. Raises CheckpointError for another model."""
        self._learner.restore(saved["learner"])
        self._saved = self._learner.step
        self._gatherer.restore(saved["gatherer"])
        self.history, self.best = saved["history"], saved["best"]
        restore_random(saved["random"])


def accepted_step(states: States, identity: Identity, *, resume: bool) -> int | None:
    """The newest saved step, from which the training of `identity` may go on; None if none is saved.

    Reads no weights and changes nothing, so that a command that will be refused is refused before it has kept
    its arguments. Raises UsageError if no state is saved and `resume` is set, CheckpointError for a state of
    another model, other tasks or other settings.
    """
    steps = states.steps()
    if not steps:
        if resume:
            raise UsageError(
                "there is nothing to resume: no state is saved under this --name; leave --resume out to start"
            )
        return None
    manifest = states.manifest(steps[-1])
    differs = difference(manifest.identity, identity, resume=resume)
    if differs:
        raise CheckpointError(f"the training of this --name, saved at step {manifest.step}, {differs}")
    return steps[-1]


def saved_progress(states: States, identity: Identity, *, resume: bool) -> dict[str, Any] | None:
    """The tree of the newest saved state; None if there is none. Says on stderr which code of the user was
    edited since. Raises as `accepted_step`, and CheckpointError for a damaged state."""
    step = accepted_step(states, identity, resume=resume)
    if step is None:
        return None
    manifest, tree = states.read(step)
    if changed := edited(manifest.identity, identity):
        print(
            f"nano: {' and '.join(changed)} changed since step {manifest.step} was saved: the steps from here"
            " on are of the new code, and cannot be compared with those before",
            file=sys.stderr,
        )
    saved: dict[str, Any] = tree
    return saved
