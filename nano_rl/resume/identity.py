"""What a training is of: its model, tasks and settings. A saved state goes on only with the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, JsonValue

from nano_shared.types import Value

FREE = ("steps", "save_every", "keep_states", "max_tokens", "heartbeat_seconds")
"""settings that leave the steps done as they were, so that `resume` may change them"""
_NEVER = ("resume",)
"""says how to start, and is no setting of the training"""


class Identity(Value):
    """Everything that decides what the steps of a training do."""

    code_version: str
    model: str
    """content hash of the weights that training begins from"""
    model_name: str
    """what the user calls them; not compared"""
    profile_hash: str
    template_hash: str
    tasks: str
    """content hash of the ids of the tasks, in order"""
    config: dict[str, JsonValue]
    limits: dict[str, JsonValue] = Field({})
    """of completions and runs, where they are not those of every task"""


def difference(saved: Identity, now: Identity, *, resume: bool) -> str | None:
    """One sentence about what differs and what to do, or None where the saved state can go on.

    `resume` lets settings differ that the steps done do not depend on: those of FREE, and the guards'.
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
    old, new = ({**of.config, **({"limit": of.limits} if of.limits else {})} for of in (saved, now))
    changed = list(_changes(old, new, resume))
    if not changed:
        return None
    told = ", ".join(f"{name} was {old!r} and is {new!r}" for name, old, new in changed)
    free = all(_is_free(name, saved.config) for name, _, _ in changed)
    return (
        f"was saved with other settings: {told}; "
        + ("--resume accepts that" if free and not resume else "give the same")
        + ", or start anew under another --name"
    )


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
    if name == "steps":  # other schedules end where the steps end, so the rate of the steps done would differ
        optimizer = saved.get("optimizer")
        return isinstance(optimizer, Mapping) and optimizer.get("schedule") == "constant"
    return name in FREE or name.startswith("guards.")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
