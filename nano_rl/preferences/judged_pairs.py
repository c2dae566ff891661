"""What a judge or a constitution says of logged runs, task by task, for the pairs that it prefers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nano_coder.runtime import Runtime
from nano_rl.preferences.log_pairs import ALONE
from nano_rl.rewards.part import Part, checked
from nano_rl.rewards.registry import open_part
from nano_shared.errors import ConfigError, UsageError
from nano_shared.types import Trajectory


def open_judge(name: str, settings: Mapping[str, str | None]) -> Part:
    """The part `judge` or `constitution` with the settings that are given. Raises UsageError where it cannot
    judge."""
    try:
        part = open_part(name, {key: value for key, value in settings.items() if value is not None})
        part.prepare()
    except ConfigError as problem:
        raise UsageError(f"--from {name}: {problem}") from None
    return part


def judged(
    name: str, part: Part, groups: Sequence[Sequence[Trajectory]], runtime: Runtime, refused: Counter[str]
) -> dict[str, float]:
    """Run -> what the part says of it, between 0 and 1; runs that it is silent on or failed at are counted.

    The runs of a group tried one task and are compared with each other.
    """
    worth: dict[str, float] = {}
    for runs in groups:
        if len(runs) < 2:
            refused[f"{name}: {ALONE}"] += len(runs)
            continue
        for run, score in zip(runs, part.score(runs, runtime), strict=True):
            value = checked(name, run, score).value
            if value is None:
                refused[f"{name}: {score.failure or 'nothing to say'}"] += 1
            else:
                worth[run.id] = value
    return worth
