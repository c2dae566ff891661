"""What a set of tasks promises: determinism, even spread, disjoint splits, and files that refuse bad rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from nano_rl.tasks.task_file import read_tasks, write_tasks
from nano_shared.errors import UsageError
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

LEVELS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def train() -> list[Task]:
    return make_tasks(levels=LEVELS, n=72, seed=1, split=Split.TRAIN)


@pytest.fixture(scope="module")
def held_out() -> list[Task]:
    return make_tasks(levels=LEVELS, n=36, seed=1, split=Split.TEST)


@pytest.mark.slow
def test_the_same_arguments_make_the_same_tasks(train: list[Task]) -> None:
    assert make_tasks(levels=LEVELS, n=48, seed=1, split=Split.TRAIN) == train[:48]
    assert make_tasks(levels=LEVELS, n=48, seed=2, split=Split.TRAIN) != train[:48]


def test_keys_are_distinct(train: list[Task], held_out: list[Task]) -> None:
    assert len({t.key for t in (*train, *held_out)}) == len(train) + len(held_out)


def test_tasks_are_spread_evenly(train: list[Task]) -> None:
    assert set(Counter(t.level for t in train).values()) == {18}
    assert Counter(t.view for t in train if t.level == 1) == {"complete": 6, "calculate": 6, "predict": 6}


def test_splits_share_no_family_and_no_program(train: list[Task], held_out: list[Task]) -> None:
    assert not {t.family for t in train} & {t.family for t in held_out}
    assert not {t.program_hash for t in train} & {t.program_hash for t in held_out}


def test_views_and_levels_can_be_chosen() -> None:
    tasks = make_tasks(levels=[2, 3], n=8, seed=3, split=Split.TEST, views=["repair"])
    assert {(t.level, t.view) for t in tasks} == {(2, "repair"), (3, "repair")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"levels": [9]}, "unknown level 9"),
        ({"levels": []}, "unknown level"),
        ({"suite": "poems"}, "unknown suite 'poems'"),
        ({"views": ["fixx"]}, "unknown view 'fixx'"),
        ({"levels": [0], "views": ["repair"]}, "no view among repair"),
        ({"n": -1}, "n = -1"),
    ],
)
def test_what_is_unknown_is_refused_by_name(arguments: dict[str, object], named: str) -> None:
    given = {"levels": [0], "n": 1, "seed": 0, "split": Split.TRAIN, **arguments}
    with pytest.raises(UsageError, match=named):
        make_tasks(**given)  # type: ignore[arg-type]


def test_tasks_come_back_from_a_file_as_they_were(tmp_path: Path, train: list[Task]) -> None:
    write_tasks(tmp_path / "new" / "tasks.jsonl", train[:40])
    assert read_tasks(tmp_path / "new" / "tasks.jsonl") == train[:40]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ('{"key": "k", "prompt": "p", "promt": 1}', "promt"),
        ('{"key": "k"}', "prompt"),
        ('{"key": "k", "prompt": "p", "level": "x"}', "level"),
        ("{nonsense", "row"),
        ('{"key": "k", "prompt": "p", "hidden": {"kind": "cases"}}', "hidden"),
    ],
)
def test_a_malformed_row_is_refused_by_file_line_and_field(
    tmp_path: Path, row: str, named: str, train: list[Task]
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(train[0].model_dump_json() + "\n\n" + row + "\n")
    with pytest.raises(UsageError, match=rf"tasks\.jsonl.*3: {named}"):
        read_tasks(path)


def test_a_repeated_key_is_refused(tmp_path: Path, train: list[Task]) -> None:
    write_tasks(tmp_path / "t.jsonl", [train[0], train[1], train[0]])
    with pytest.raises(UsageError, match=r"3: key: .* is already used"):
        read_tasks(tmp_path / "t.jsonl")


def test_files_without_tasks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    for name in ("empty.jsonl", "binary.jsonl", "missing.jsonl", "."):
        with pytest.raises(UsageError, match=name.split(".")[0] or str(tmp_path)):
            read_tasks(tmp_path / name)
