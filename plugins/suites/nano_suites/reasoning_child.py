"""Child process: generates questions of reasoning-gym, one JSON object per line in and out.

In its own process, because some questions depend on the hash seed, which is fixed here, and because the
import of the library is slow. `{}` requests the names of the datasets.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

# what a dataset may raise at a configuration that its curriculum proposes and it cannot serve
_REFUSALS = (
    ValueError, TypeError, AssertionError, LookupError, ArithmeticError, RuntimeError, AttributeError,
)  # fmt: skip
_BY_SETTINGS = ("composite",)
"""datasets composed of others"""
_TAKES_ANYTHING = ("game_of_life_halting",)
"""datasets whose scorer only tests whether the answer is empty"""


def names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(name for name in DATASETS if name not in _BY_SETTINGS + _TAKES_ANYTHING)


def question(dataset: str, seed: int, level: int) -> dict[str, Any]:
    """One question at the hardest level up to `level` that the dataset can serve."""
    import reasoning_gym

    for config in [*(curriculum(dataset, of) for of in range(level, -1, -1)), {}]:
        if config is None:
            continue
        try:
            made = reasoning_gym.create_dataset(dataset, seed=seed, size=1, **config)
            entry = made[0]
            answer = solution(made, entry)
        except _REFUSALS:
            continue
        made_by = version("reasoning-gym")
        return {"question": entry["question"], "answer": answer, "config": config, "version": made_by}
    return {"error": f"dataset {dataset} makes no question of seed {seed}"}


def curriculum(dataset: str, level: int) -> dict[str, Any] | None:
    """The configuration of a level, as JSON; None for a dataset without levels."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(dataset):
        return None
    levels = create_curriculum(dataset)
    try:
        for name, attribute in levels.attributes.items():
            levels.set_attr_level(name, min(level, len(attribute.levels) - 1))
        config = asdict(levels.generate_configuration())
        made: dict[str, Any] = json.loads(json.dumps(config))
    except _REFUSALS:
        return None
    return {key: value for key, value in made.items() if key not in ("seed", "size")}


def solution(made: Any, entry: dict[str, Any]) -> str | None:
    """An answer with a score of 1: the given one, or one from its metadata."""
    held = entry.get("metadata", {}).values()
    some = [value[0] if isinstance(value, list) and value else value for value in held]
    for candidate in (entry["answer"], *held, *some):
        if candidate is None or isinstance(candidate, dict):
            continue
        text = str(candidate)
        try:
            if made.score_answer(text, entry) >= 1 - 1e-9:
                return text
        except _REFUSALS:
            continue
    return None


def serve() -> None:
    # whatever a dataset prints must not stand between the answers
    out, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr
    for line in sys.stdin:
        asked = json.loads(line)
        answer = question(**asked) if asked else names()
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    serve()
