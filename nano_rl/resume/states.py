"""The saved states of a training: one folder per step, written atomically.

A folder holds a tree of tensors and, written last, `state.json` with the hash of every file and the identity
of the training, which must be equal to resume. A thread writes it during the next rollouts, while the weights
do not change; `join` waits for the thread before the next update. A killed process loses at most its current
step.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from nano_rl.config.training import TrainConfig, saved_settings
from nano_rl.learn.offline import flat_settings
from nano_shared.errors import CheckpointError, ConfigError
from nano_shared.files import durable_folder, file_hash, sweep, write_text
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
    edited code goes on with a word (`edited`)"""


def edited(saved: Identity, now: Identity) -> list[str]:
    """Files of users whose source is another one than when the state was saved."""
    return [file for file, code in saved.code.items() if now.code.get(file, code) != code]


def difference(saved: Identity, now: Identity, *, resume: bool) -> str | None:
    """A sentence about the difference and what to do, or None if the saved state can be resumed.

    With `resume`, settings in FREE and those of the guards may differ.
    """
    if saved.code_version != now.code_version:
        return (
            f"was saved by nano {saved.code_version}, and this is {now.code_version}, whose steps may differ;"
            f" go on with {saved.code_version}, or start anew under another --name"
        )
    if saved.model != now.model:
        names = (saved.model_name or saved.model, now.model_name or now.model)
        began = (
            f"{names[0]}, not from {names[1]}" if names[0] != names[1] else f"other weights than {names[1]}"
        )
        return f"began from {began}; give the same --model, or another --name"
    if (saved.profile_hash, saved.template_hash) != (now.profile_hash, now.template_hash):
        return "began under another profile or chat template; start anew under another --name"
    if saved.tasks != now.tasks:
        return "began with other tasks, or the same in another order; give the same ones, or another --name"
    try:
        known = TrainConfig.model_validate(saved_settings(saved.config)).model_dump(mode="json")
    except ConfigError as problem:
        return str(problem)
    old, new = (
        {**config, **({"limit": of.limits} if of.limits else {})}
        for of, config in ((saved, known), (now, now.config))
    )
    changed = list(_changes(old, new, resume))
    if not changed:
        return None
    listed = ", ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in changed)
    free = all(_is_free(name, saved.config) for name, _, _ in changed)
    return (
        f"was saved with other settings: {listed}; "
        + ("--resume accepts that" if free and not resume else "give the same")
        + ", or start anew under another --name"
    )


def _changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], resume: bool
) -> Iterator[tuple[str, Any, Any]]:
    old, new = flat_settings(saved), flat_settings(now)
    for name in dict.fromkeys((*old, *new)):
        if name in _NEVER or (resume and _is_free(name, saved)):
            continue
        if old.get(name) != new.get(name):
            yield name, old.get(name), new.get(name)


def _is_free(name: str, saved: Mapping[str, Any]) -> bool:
    if name == "steps":  # other schedules depend on the number of steps
        optimizer = saved.get("optimizer")
        return isinstance(optimizer, Mapping) and optimizer.get("schedule") == "constant"
    return name in FREE or name.startswith("guards.")


_TENSOR, _DICT = "tensor", "dict"


def save_tree(folder: Path, name: str, tree: Any) -> None:
    """Write a tree to `NAME.json` and its tensors to `NAME.safetensors`. Floats are restored exactly.

    A tree consists of dicts with string or integer keys, lists, tuples (restored as lists), tensors, strings,
    numbers, booleans and None. Raises TypeError for anything else, and OSError for a full disk.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    plain = _split(tree, tensors)
    save_file(tensors, str(folder / f"{name}.safetensors"))
    (folder / f"{name}.json").write_text(json.dumps(plain), encoding="utf-8")


def load_tree(folder: Path, name: str) -> Any:
    """The tree that `save_tree` wrote, its tensors on the CPU."""
    from safetensors.torch import load_file

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
"""folder name in the folder of a training"""
MANIFEST = "state.json"
TREE = "training"
VERSION = 1


class StateManifest(Value):
    version: Literal[1] = 1
    step: int = Field(ge=0)
    """steps done"""
    identity: Identity
    created: float
    """unix seconds"""
    files: dict[str, str]
    """name -> `sha256:` of its bytes"""


class States:
    """The states in `folder`; this process is the only writer while `claimed`."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """`keep` is the number of last states that are kept, in addition to the best one."""
        self._folder = folder
        self._keep = keep
        self._writer = ThreadPoolExecutor(1, "nano-save-state")
        self._writing: Future[None] | None = None

    @contextmanager
    def claimed(self) -> Iterator[States]:
        """Lock the folder until the block ends and the last state is on disk; removes leftovers of killed
        writers.

        Raises CheckpointError at once if another process trains under this name.
        """
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
        """Steps with a saved state, ascending."""
        return sorted(
            int(path.parent.name)
            for path in self._folder.glob(f"*/{MANIFEST}")
            if path.parent.name.isdecimal()
        )

    def save(self, step: int, tree: Any, identity: Identity, *, best: int | None = None) -> None:
        """Start writing the state after `step` steps; the state of step `best` is not deleted.

        The tensors of `tree` must not change until `join`.
        """
        self.join()
        self._writing = self._writer.submit(self._write, step, tree, identity, best)

    def join(self) -> None:
        """Wait until the state is on disk. Raises CheckpointError if that failed; older states are intact."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def manifest(self, step: int) -> StateManifest:
        """What the state after `step` steps is of. Raises CheckpointError as `read`, and verifies no other
        file."""
        return _manifest(self._folder / f"{step:08d}")

    def read(self, step: int) -> tuple[StateManifest, Any]:
        """The state after `step` steps. Raises CheckpointError for one that is missing, damaged or newer."""
        path = self._folder / f"{step:08d}"
        manifest = self.manifest(step)
        for name, expected in manifest.files.items():
            if not (path / name).is_file() or file_hash(path / name) != expected:
                raise CheckpointError(
                    f"state {path}: {name} is missing or corrupt; delete that folder to go on from the state"
                    " before it"
                )
        return manifest, load_tree(path, TREE)

    def _write(self, step: int, tree: Any, identity: Identity, best: int | None) -> None:
        target = self._folder / f"{step:08d}"
        if target.exists():  # a state without a manifest
            self._remove(target)
        with durable_folder(target, CheckpointError) as folder:
            save_tree(folder, TREE, tree)
            manifest = StateManifest(
                step=step,
                identity=identity,
                created=time.time(),
                files={path.name: file_hash(path) for path in sorted(folder.iterdir())},
            )
            write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n", CheckpointError)
        for old in self.steps()[: -self._keep]:
            if old != best:
                self._remove(self._folder / f"{old:08d}")

    def _remove(self, path: Path) -> None:
        trash = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
        path.rename(trash)  # so that a kill in between leaves no partial state
        shutil.rmtree(trash)


def _manifest(path: Path) -> StateManifest:
    try:
        value = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no state at {path}") from None
    except ValueError as error:
        raise CheckpointError(f"state {path}: {MANIFEST} is corrupt ({error})") from error
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"state {path} was written by a newer nano (version {version}, this one reads {VERSION})"
        )
    try:
        return StateManifest.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise CheckpointError(f"state {path}: {MANIFEST}: {where}: {first['msg']}") from error
