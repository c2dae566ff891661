"""Hidden checks: old rows are read, ids and exports stay, and fields of other kinds are refused."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from log_values import a_run
from pydantic import ValidationError

from nano_shared.files import content_hash
from nano_shared.hidden_checks import (
    EMPTY_FIELDS,
    AnswerChecks,
    Case,
    CaseChecks,
    ChecksOfAKind,
    CommandChecks,
    HiddenChecks,
    MutantChecks,
    RewardFileChecks,
    StateCheck,
    StateChecks,
    Suite,
    SuiteChecks,
    expects_answer,
)
from nano_shared.store import LogStore
from nano_shared.types import Task

OLD = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "tasks_before_the_union.jsonl").read_text().splitlines()
]
"""rows of tasks with the id and the export that the single model of all kinds gave them"""
KINDS = {cls.model_fields["kind"].default: cls for cls in (
    CaseChecks, AnswerChecks, CommandChecks, SuiteChecks, StateChecks, MutantChecks, RewardFileChecks,
)}  # fmt: skip

texts = st.text('ab \n"\u00e9\u2028', max_size=4)
words = st.text("ab/.", min_size=1, max_size=4)
files = st.dictionaries(words, texts, max_size=2)
some_files = st.dictionaries(words, texts, min_size=1, max_size=2)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
checks = st.one_of(
    st.builds(
        CaseChecks, entry_point=words, cases=st.tuples(st.builds(Case, args=st.lists(values, max_size=2)))
    ),
    st.builds(AnswerChecks, answer=values),
    st.builds(CommandChecks, command=words, files=files),
    st.builds(
        SuiteChecks,
        entry_point=st.none() | words,
        suite=st.builds(Suite, framework=st.just("pytest"), files=some_files),
    ),
    st.builds(
        StateChecks, state=st.tuples(st.builds(StateCheck, kind=st.just("json"), path=words, expected=values))
    ),
    st.builds(MutantChecks, mutants=some_files, reference=texts, module=words),
    st.builds(RewardFileChecks, command=words, files=files, reward_path=words),
)


def task_of(hidden: object) -> Task:
    return Task.model_validate({"key": "k", "prompt": "p", "hidden": hidden})


@pytest.mark.parametrize("old", OLD, ids=lambda old: old["row"]["key"])
def test_an_old_row_keeps_its_id_and_its_export(old: dict[str, Any]) -> None:
    task = Task.model_validate(old["row"])
    assert type(task.hidden) is KINDS[old["row"]["hidden"]["kind"]]
    assert task.id == old["id"] == content_hash(old["row"])
    assert task.model_dump_json(exclude_defaults=True) == old["export"]
    assert Task.model_validate_json(old["export"]) == task


def test_the_old_rows_are_of_every_kind() -> None:
    assert {old["row"]["hidden"]["kind"] for old in OLD} == KINDS.keys()


@given(checks)
def test_every_dump_is_read_back_with_the_same_id(hidden: HiddenChecks) -> None:
    task = task_of(hidden)
    full = json.loads(json.dumps({**task.model_dump(), "hidden": hidden.full_dump()}))
    assert full["hidden"].keys() == {"kind", *EMPTY_FIELDS}
    assert content_hash(full) == task.id
    for text in (json.dumps(full), task.model_dump_json(), task.model_dump_json(exclude_defaults=True)):
        back = Task.model_validate_json(text)
        assert back == task
        assert back.id == task.id
    assert Task.model_validate(task.model_dump()) == task


@given(
    checks, st.sampled_from(sorted(EMPTY_FIELDS)), st.sampled_from([0, False, "", "x", [None], {"a": "b"}])
)
def test_a_field_of_another_kind_is_refused_with_a_sentence(
    hidden: ChecksOfAKind, name: str, value: object
) -> None:
    dump = hidden.full_dump()
    assume(name not in type(hidden).model_fields)
    with pytest.raises(ValidationError, match=f"checks of kind '{hidden.kind}' have no field `{name}`"):
        task_of({**dump, name: value})


@pytest.mark.parametrize(
    ("hidden", "sentence"),
    [
        ({"kind": "case"}, "does not match any of the expected tags: 'cases'"),
        ({"kind": "answer", "anwser": None}, "Extra inputs are not permitted"),
        ({"kind": "cases", "entry_point": "f", "cases": []}, "at least 1 item"),
        ({"kind": "cases", "entry_point": "", "cases": [{}]}, "at least 1 character"),
        ({"kind": "command", "command": None}, "valid string"),
        ({"kind": "suite", "suite": {"framework": "pytest", "files": {}}}, "at least 1 item"),
        ({"kind": "state", "state": []}, "at least 1 item"),
        ({"kind": "mutants", "mutants": {"m": "x"}, "reference": None, "module": "m.py"}, "valid string"),
        ({"kind": "reward_file", "command": "true"}, "Field required"),
    ],
)
def test_checks_that_could_not_be_run_are_refused(hidden: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        task_of(hidden)


def test_which_checks_depend_on_the_answer() -> None:
    by_state = StateChecks(state=(StateCheck(kind="answer", expected=4),))
    by_file = StateChecks(state=(StateCheck(kind="text", path="a", expected=""),))
    assert [expects_answer(hidden) for hidden in (AnswerChecks(), by_state, by_file, None)] == [1, 1, 0, 0]


@pytest.mark.parametrize("old", OLD, ids=lambda old: old["row"]["key"])
def test_a_log_with_an_old_row_is_read(old: dict[str, Any], tmp_path: Path) -> None:
    task = Task.model_validate(old["row"])
    with LogStore.open(tmp_path / "log.db") as store:
        store.append(a_run(task=task))
    with closing(sqlite3.connect(tmp_path / "log.db")) as database, database:
        body = json.dumps(old["row"])
        changed = database.execute("UPDATE log_tasks SET body = ? WHERE id = ?", (body, old["id"]))
        assert changed.rowcount == 1
    with LogStore.open(tmp_path / "log.db") as store:
        assert store.get("run1").task == task
