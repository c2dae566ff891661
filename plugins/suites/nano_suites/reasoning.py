"""The suite `reasoning-gym`: the datasets of the library of that name, graded by their own scorers.

The suite `reasoning-gym` draws from all datasets, and whole datasets are held out; `reasoning-gym:DATASET`
draws from one, and classes of its questions are.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from functools import cache, partial
from typing import Any

from nano_rl.tasks.suite import Made, TaskSuite, View, split_of
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks, Scorer
from nano_shared.process import own_python
from nano_shared.types import Limits, Split
from nano_suites.family import Family, act, split_families

TOOLS = ("calculate", "submit")
LIMITS = Limits(max_turns=12, max_tokens=4096)
LEVELS = range(4)
_NAME = "reasoning-gym"
_CLASSES = 50
_MOST_DRAWS = 300
_ENDING = "\n\nSubmit the answer alone."


class Library:
    """The library in a child process, which generates one question at a time."""

    def __init__(self) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UsageError("reasoning-gym is not installed; pip install 'nano-rl-coder[reasoning-gym]'")
        self._lock = threading.Lock()
        self._child = subprocess.Popen(
            own_python("-W", "ignore", "-m", "nano_suites.reasoning_child"), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        atexit.register(self.close)

    def ask(self, **asked: Any) -> Any:
        """Raises UsageError where the child has died."""
        assert self._child.stdin
        assert self._child.stdout
        with self._lock:
            try:
                self._child.stdin.write(json.dumps(asked) + "\n")
                self._child.stdin.flush()
                line = self._child.stdout.readline()
            except BrokenPipeError:
                line = ""
        if not line:
            raise UsageError(
                f"reasoning-gym failed on {asked or 'its import'}; python -c 'import reasoning_gym'"
            )
        return json.loads(line)

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream:
                stream.close()


@cache
def library() -> Library:
    return Library()


@cache
def datasets() -> tuple[str, ...]:
    """The names of all datasets."""
    return tuple(library().ask())


def draw(dataset: str, level: int, rng: random.Random) -> Made:
    """One question. Raises UsageError for a dataset that makes none."""
    seed = rng.randrange(2**31)
    made = library().ask(dataset=dataset, seed=seed, level=level)
    if "error" in made:
        raise UsageError(made["error"])
    answer = made["answer"]
    scorer = Scorer(
        version=made["version"], dataset=dataset, seed=seed, config=made["config"],
        question=content_hash(made["question"]),
    )  # fmt: skip
    prompt = made["question"] + _ENDING
    return Made(
        prompt=prompt,
        hidden=AnswerChecks(answer=answer, scorer=scorer),
        oracle=() if answer is None else (act("submit", answer=answer),),
        program=("", content_hash(prompt)),
        tools=TOOLS,
        limits=LIMITS,
    )


def _any(rng: random.Random, split: Split, level: int) -> Made:
    families = [Family(name, partial(draw, name, level)) for name in datasets()]
    family = rng.choice(split_families(families, _NAME)[split])
    return _of_family(family.draw(rng), family.name)


def _of_family(made: Made, name: str) -> Made:
    return replace(made, program=(f"{_NAME}:{name}", made.program[1]))


def _one(dataset: str, rng: random.Random, split: Split, level: int) -> Made:
    """A question of the split; the same question is never in both splits."""
    if dataset not in datasets():
        raise UsageError(f"unknown dataset {dataset!r} of reasoning-gym; datasets: {', '.join(datasets())}")
    for _ in range(_MOST_DRAWS):
        drawn = draw(dataset, level, rng)
        number = int(content_hash(drawn.prompt).removeprefix("sha256:")[:8], 16) % _CLASSES
        if split_of(family := f"{dataset}:{number}") is split:
            return _of_family(drawn, family)
    raise UsageError(f"dataset {dataset} has too few questions at level {level} for a {split} split")


def suite_of(dataset: str) -> TaskSuite:
    """The suite of one dataset, whose name is looked up when the first task is made."""
    return TaskSuite(
        name=f"{_NAME}:{dataset}", version="1", about=f"the dataset {dataset} of reasoning-gym",
        views=tuple(View("question", level, partial(_one, dataset)) for level in LEVELS),
    )  # fmt: skip


SUITE = TaskSuite(
    name=_NAME, version="1",
    about="every dataset of reasoning-gym; reasoning-gym:DATASET is one of them (extra reasoning-gym)",
    views=tuple(View("question", level, _any) for level in LEVELS), member=suite_of,
)  # fmt: skip
