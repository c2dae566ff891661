"""What a training is saved as, so that it goes on bit for bit, and its end by a signal.

A state is a folder a step: a tree of tensors and, written last, `state.json` with the hash of every file and
the identity of the training, which must be equal to resume. A thread writes it during the next rollouts,
while the weights do not change; `join` waits for the thread before the next update. A killed process loses
the steps since the last state that was written.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from pydantic import Field, JsonValue, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano_coder.models.opening import open_weights
from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Gatherer, Sources, curriculum_metrics
from nano_rl.learn.learner import Learner, prepare, restore_weights
from nano_rl.training_record import USED, read_used
from nano_shared.checkpoint import Manifest
from nano_shared.errors import CheckpointError, Interrupted, UsageError
from nano_shared.extension_points import leave_hanging_calls
from nano_shared.files import durable_folder, file_hash, sweep, write_text
from nano_shared.settings import parse_config
from nano_shared.store import LogStore
from nano_shared.types import Value

FREE = ("steps", "max_tokens")
"""settings that do not affect the steps done so far, so that `resume` may change them"""
_NEVER = ("resume", "save_every", "offload", "engine", "ray", "rollout_workers")
"""settings that are not compared"""


class Identity(Value):
    """Everything that determines the steps of a training."""

    code_version: str
    model: str
    """content hash of the weights that training begins from"""
    model_name: str
    """the user's name of the model; not compared"""
    profile_hash: str
    template_hash: str
    tasks: str
    """content hash of the ids of the tasks, in order"""
    config: dict[str, JsonValue]
    limits: dict[str, JsonValue] = Field({})
    """limits of completions and runs that differ from the defaults"""
    code: dict[str, str] = Field({})
    """file of users (rewards, environments, tools, objectives) -> hash of its source; not compared, since
    edited code goes on with a word"""


def difference(saved: Identity, now: Identity, *, resume: bool) -> str | None:
    """A sentence about the difference and what to do, or None if the saved state can be resumed. With
    `resume`, settings in FREE and those of the guards may differ."""
    if saved.code_version != now.code_version:
        return (
            f"was saved by nano {saved.code_version}, and this is {now.code_version}, whose steps may differ;"
            f" go on with {saved.code_version}, or start anew under another --name"
        )
    if saved.model != now.model:
        began = f"{saved.model_name}, not from {now.model_name}"
        if saved.model_name == now.model_name:
            began = f"other weights than {now.model_name}"
        return f"began from {began}; give the same --model, or another --name"
    if (saved.profile_hash, saved.template_hash) != (now.profile_hash, now.template_hash):
        return "began under another profile or chat template; start anew under another --name"
    if saved.tasks != now.tasks:
        return "began with other tasks, or the same in another order; give the same ones, or another --name"
    settings = (flat_settings({**of.config, "limit": of.limits}) for of in (saved, now))
    changed = {
        name: what
        for name, what in changed_settings(*settings).items()
        if name not in _NEVER and not (resume and _is_free(name, saved))
    }
    if not changed:
        return None
    free = not resume and all(_is_free(name, saved) for name in changed)
    return (
        f"was saved with other settings: {', '.join(changed.values())}; "
        + ("--resume accepts that" if free else "give the same")
        + ", or start anew under another --name"
    )


def _is_free(name: str, saved: Identity) -> bool:
    if name == "steps":  # other schedules depend on the number of steps
        optimizer = saved.config["optimizer"]
        return isinstance(optimizer, dict) and optimizer["schedule"] == "constant"
    return name in FREE or name.startswith("guards.")


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    }


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


_TENSOR, _DICT = "tensor", "dict"


def save_tree(folder: Path, name: str, tree: Any) -> None:
    """Write a tree to `NAME.json` and its tensors to `NAME.safetensors`. Floats are restored exactly. A tree
    consists of dicts with string or integer keys, lists, tuples (restored as lists), tensors, strings,
    numbers, booleans and None. Raises TypeError for anything else, and OSError for a full disk."""
    tensors: dict[str, Tensor] = {}
    plain = _split(tree, tensors)
    save_file(tensors, str(folder / f"{name}.safetensors"))
    (folder / f"{name}.json").write_text(json.dumps(plain), encoding="utf-8")


def load_tree(folder: Path, name: str) -> Any:
    tensors = load_file(str(folder / f"{name}.safetensors"))
    return _join(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")), tensors)


def _split(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON: tensors become names, dicts become lists of pairs, since JSON keys are strings."""
    if isinstance(tree, Tensor):
        value = tree.detach().contiguous()
        # safetensors refuses shared memory, as of a weight that is in two parts of the tree
        for name, other in tensors.items():
            if value.data_ptr() == other.data_ptr() and value.numel() and value.shape == other.shape:
                return {_TENSOR: name}
        tensors[name := str(len(tensors))] = value
        return {_TENSOR: name}
    if isinstance(tree, dict):
        return {_DICT: [[key, _split(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return [_split(value, tensors) for value in tree]
    return tree


def _join(plain: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(plain, list):
        return [_join(value, tensors) for value in plain]
    if isinstance(plain, dict):
        if _TENSOR in plain:
            return tensors[plain[_TENSOR]]
        return {key: _join(value, tensors) for key, value in plain[_DICT]}
    return plain


STATES = "states"
MANIFEST = "state.json"
TREE = "training"


class StateManifest(Value):
    version: Literal[1] = 1
    step: int = Field(ge=0)
    identity: dict[str, JsonValue]
    created: float
    files: dict[str, str]


class States:
    """The states in `folder`; this process is the only writer while `claimed`."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """`keep` is the number of last states that are kept, in addition to the best one."""
        self._folder, self._keep = folder, keep
        self._writer = ThreadPoolExecutor(1, "nano-save-state")
        self._writing: Future[None] | None = None

    @contextmanager
    def claimed(self) -> Iterator[States]:
        """Lock the folder until the block ends and the last state is on disk; removes leftovers of killed
        writers. Raises CheckpointError at once if another process trains under this name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._folder / ".lock", timeout=0):
                sweep(self._folder)
                try:
                    yield self
                finally:
                    self._writer.shutdown(wait=True)
                self.join()
        except Timeout:
            raise CheckpointError(
                f"{self._folder.parent} is being trained by another process; wait for it, or give another"
                " --name"
            ) from None

    def steps(self) -> list[int]:
        names = (path.parent.name for path in self._folder.glob(f"*/{MANIFEST}"))
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, step: int, tree: Any, identity: dict[str, Any], *, best: int | None = None) -> None:
        """Start writing the state after `step` steps; the state of step `best` is not deleted. The tensors of
        `tree` must not change until `join`."""
        self.join()
        self._writing = self._writer.submit(self._write, step, tree, identity, best)

    def join(self) -> None:
        """Wait until the state is on disk. Raises CheckpointError if that failed; older states are intact."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def manifest(self, step: int) -> StateManifest:
        """The manifest alone of the state after `step` steps. Raises CheckpointError."""
        path = self._folder / f"{step:08d}" / MANIFEST
        try:
            return StateManifest.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise CheckpointError(
                f"state {path} is damaged, or of a newer nano: {where}: {first['msg']}"
            ) from None

    def read(self, step: int) -> tuple[StateManifest, Any]:
        """The state after `step` steps. Raises CheckpointError for one that is missing, damaged or newer."""
        path, manifest = self._folder / f"{step:08d}", self.manifest(step)
        for name, expected in manifest.files.items():
            if not (path / name).is_file() or file_hash(path / name) != expected:
                raise CheckpointError(
                    f"state {path}: {name} is missing or corrupt; delete that folder to go on from the state"
                    " before it"
                )
        return manifest, load_tree(path, TREE)

    def _write(self, step: int, tree: Any, identity: dict[str, Any], best: int | None) -> None:
        target = self._folder / f"{step:08d}"
        if target.exists():  # a state without a manifest
            self._remove(target)
        with durable_folder(target, CheckpointError) as folder:
            save_tree(folder, TREE, tree)
            files = {path.name: file_hash(path) for path in sorted(folder.iterdir())}
            manifest = StateManifest(step=step, identity=identity, created=time.time(), files=files)
            write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n", CheckpointError)
        for old in self.steps()[: -self._keep]:
            if old != best:
                self._remove(self._folder / f"{old:08d}")

    def _remove(self, path: Path) -> None:
        trash = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
        path.rename(trash)  # so that a kill in between leaves no partial state
        shutil.rmtree(trash)


def seed_all(seed: int) -> None:
    """Seed the global random generators of Python, torch and, if loaded, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), keys.tolist(), *rest]
    return state


def restore_random(state: dict[str, Any]) -> None:
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
        self._states, self._identity = states, identity.model_dump(mode="json")
        self._saved: int | None = None

    def note_best(self, values: Mapping[str, float], *, off_policy_steps: int = 0) -> None:
        """Update `best` if the weights that sampled this step's groups, `off_policy_steps` ago, are saved.
        Compared by the level of the curriculum, then by the mean reward; later weights win ties."""
        step, reward = self._learner.step - off_policy_steps, values.get("reward_mean")
        if reward is None or self._sources.from_logs or step not in self._states.steps():
            return
        level = float(curriculum_metrics(self._sources.curriculum).get("curriculum_level", 0.0))
        if self.best is None or (level, reward) >= (self.best["level"], self.best["reward"]):
            self.best = {"step": step, "level": level, "reward": reward}

    def save(self) -> None:
        """Start writing the state, unless it is saved already; the weights must not change until
        `States.join`. Raises CheckpointError if the previous state could not be written."""
        if self._saved == self._learner.step:
            return
        self._saved = self._learner.step
        tree = {
            "learner": self._learner.state(), "gatherer": self._gatherer.state(),
            "logged": self._sources.logged_runs(), "history": list(self.history), "best": self.best,
            "random": random_state(),
        }  # fmt: skip
        best = int(self.best["step"]) if self.best else None
        self._states.save(self._learner.step, tree, self._identity, best=best)

    def restore(self, saved: Mapping[str, Any]) -> None:
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
    saved = Identity.model_validate(states.manifest(steps[-1]).identity)
    if differs := difference(saved, identity, resume=resume):
        raise CheckpointError(f"the training of this --name, saved at step {steps[-1]}, {differs}")
    return steps[-1]


def saved_progress(states: States, identity: Identity, *, resume: bool) -> dict[str, Any] | None:
    """The tree of the newest saved state; None if there is none. Says on stderr which code of the user was
    edited since. Raises as `accepted_step`, and CheckpointError for a damaged state."""
    step = accepted_step(states, identity, resume=resume)
    if step is None:
        return None
    manifest, saved = states.read(step)
    code = Identity.model_validate(manifest.identity).code
    if edited := [file for file, source in code.items() if identity.code.get(file, source) != source]:
        print(
            f"nano: {' and '.join(edited)} changed since step {step} was saved: the steps from here on are of"
            " the new code, and cannot be compared with those before",
            file=sys.stderr,
        )
    tree: dict[str, Any] = saved
    return tree


def save_best(training: Path, target: Path, store: LogStore) -> Manifest:
    """Write checkpoint `target` from the best saved state (`Progress.best`), or else from the newest one.
    `training` is the folder of a finished or stopped training, `store` its log. Raises CheckpointError if no
    state is saved, if it is damaged, and if the weights of its model have changed since."""
    states = States(training / STATES)
    steps = states.steps()
    if not steps:
        raise CheckpointError(f"no training has saved a state under {training}; nano-rl train makes one")
    best = states.read(steps[-1])[1]["best"]
    step = int(best["step"]) if best and best["step"] in steps else steps[-1]
    manifest, tree = states.read(step)
    identity = Identity.model_validate(manifest.identity)
    config = parse_config(TrainConfig, identity.config)
    opened = open_weights(identity.model_name, dtype=config.dtype)
    if opened.loaded.id != identity.model:
        raise CheckpointError(
            f"{training} began from other weights than {identity.model_name} names now; put those back"
        )
    model = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    restore_weights(model, tree["learner"]["weights"])
    groups = [group for line in read_used(training / USED)[:step] for group in line["groups"]]
    first_runs = {group["task"]: group["runs"][0] for group in groups}
    learned = Learned(
        steps=step,
        run_ids=[run for group in groups for run in group["runs"]],
        tasks=[store.get(run).task for run in first_runs.values()],
        metrics={"reward_mean": best["reward"]} if best and best["step"] == step else {},
    )
    return save_checkpoint(target, model, opened, parent=identity.model_name, config=config, learned=learned)


GRACE_SECONDS = 2.0
"""seconds after the second signal to close jails and connections; then the process exits"""


class TrainingStopped(Interrupted):
    """Training stopped by a signal, after its current step was finished and saved."""

    def __init__(self, step: int, steps: int, folder: Path) -> None:
        super().__init__(
            f"stopped after step {step} of {steps}, which is saved under {folder}; the same command goes on"
            " from there"
        )


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
    os._exit(Interrupted.exit_code)


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
