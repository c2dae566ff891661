"""What every domain promises of its tasks: determinism, and splits that share nothing."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout

import pytest
from domains import sample

from nano_rl.tasks.suite import find_suite, suite_names
from nano_shared.files import content_hash
from nano_shared.types import Split
from nano_suites.family import Family, split_families

DOMAINS = (
    "shell", "sql", "data", "logic", "search", "perceive", "plan", "memory",
)  # fmt: skip
each_domain = pytest.mark.parametrize("suite", DOMAINS)


@each_domain
def test_every_level_has_families_in_both_splits_and_none_in_both(suite: str) -> None:
    train, test = (sample(suite, 12, split) for split in Split)
    assert not {t.family for t in train} & {t.family for t in test}
    assert {t.level for t in train} == {t.level for t in test} == {0, 1, 2, 3}


@each_domain
def test_tasks_are_distinct_in_content_and_not_only_in_key(suite: str) -> None:
    tasks = sample(suite, 20)
    seen = Counter(content_hash([[one.prompt, one.files] for one in (t, *t.earlier)]) for t in tasks)
    assert max(seen.values()) == 1


@each_domain
def test_oracles_use_offered_tools_within_the_limits(suite: str) -> None:
    for task in sample(suite, 10):
        assert task.oracle
        assert task.oracle[-1].name == "submit"
        assert len(task.oracle) <= task.limits.max_turns
        assert {action.name for action in task.oracle} <= set(task.tools or ())


@each_domain
def test_a_checked_state_names_the_files_that_are_graded(suite: str) -> None:
    for task in sample(suite, 5):
        assert task.hidden is not None
        assert task.hidden.kind in ("answer", "state")
        if task.hidden.kind == "state":
            assert task.artifacts


@pytest.mark.slow
def test_hash_seeds_change_nothing() -> None:
    """This process draws its own."""
    code = (
        "from nano_suites.drawing import make_tasks\n"
        "from nano_shared.types import Split\n"
        f"for suite in {DOMAINS!r}:\n"
        "    tasks = make_tasks(suite=suite, levels=range(4), n=12, seed=9, split=Split.TRAIN)\n"
        "    print([task.id for task in tasks])\n"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()) as here:
        exec(code, {})
    assert here.getvalue() == elsewhere.stdout


def test_a_view_needs_two_families_of_distinct_names() -> None:
    family = Family("a", lambda rng: pytest.fail("never drawn"))
    for families in ([family], [family, family]):
        with pytest.raises(ValueError, match="distinct names"):
            split_families(families, "x")


def test_every_domain_is_a_suite_by_its_name() -> None:
    for name in DOMAINS:
        assert name in suite_names()
        assert find_suite(name).name == name
