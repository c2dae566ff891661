"""The identity of a training: model, tasks and settings, which must be equal to resume a saved state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from nano_rl.config.training import TrainConfig
from nano_shared.types import Value

FREE = ("steps", "save_every", "keep_states", "max_tokens", "heartbeat_seconds", "peak_tflops")
"""settings that do not affect the steps done so far, so that `resume` may change them"""
_NEVER = ("resume", "offload", "engine", "ray", "rollout_workers")
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
    old, new = ({**_whole(of.config), **({"limit": of.limits} if of.limits else {})} for of in (saved, now))
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


def _whole(config: Mapping[str, JsonValue]) -> Mapping[str, Any]:
    """The saved settings, with defaults for those that a newer version added."""
    try:
        return TrainConfig.model_validate(config).model_dump(mode="json")
    except ValidationError:  # a setting that was removed stays, and differs
        return config


def _changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], resume: bool
) -> Iterator[tuple[str, Any, Any]]:
    old, new = dict(_flat(saved)), dict(_flat(now))
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


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
