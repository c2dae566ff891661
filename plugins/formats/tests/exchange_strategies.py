"""Tasks of every kind of check, for properties that must hold of all of them."""

from __future__ import annotations

from hypothesis import strategies as st

from nano_shared.hidden_checks import (
    AnswerChecks,
    Case,
    CaseChecks,
    CommandChecks,
    HiddenChecks,
    Metric,
    MutantChecks,
    RewardFileChecks,
    StateCheck,
    StateChecks,
    Suite,
    SuiteChecks,
)
from nano_shared.types import Limits, OracleAction, Provenance, Split, Task

line = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
word = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
said = line.filter(str.strip)
path = st.builds("{}.py".format, word) | st.builds("{}/{}.txt".format, word, word)
sources = st.dictionaries(path, line, min_size=1, max_size=2)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | line,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(line, inner, max_size=2),
    max_leaves=6,
)
cases = st.lists(
    st.builds(
        Case,
        args=st.lists(json_values, max_size=2),
        kwargs=st.dictionaries(word, json_values, max_size=1),
        expected=json_values,
    ),
    min_size=1,
    max_size=2,
).map(tuple)
state_checks = st.one_of(
    st.builds(StateCheck, kind=st.sampled_from(["text", "json"]), path=path, expected=json_values),
    st.builds(StateCheck, kind=st.just("absent"), path=path),
    st.builds(StateCheck, kind=st.just("csv"), path=path, ordered=st.booleans(), expected=json_values),
    st.builds(StateCheck, kind=st.just("sql"), path=path, query=line, expected=json_values),
    st.builds(StateCheck, kind=st.just("answer"), expected=json_values),
)
suites = st.builds(
    Suite,
    framework=st.sampled_from(["script", "doctest", "unittest", "pytest"]),
    files=sources,
    names=st.lists(word, max_size=2).map(tuple),
    strict=st.booleans(),
)
metrics = st.lists(
    st.builds(Metric, name=st.sampled_from(["lines", "nesting"]), at_most=st.integers(0, 9)), max_size=1
).map(tuple)
HIDDEN = {
    "cases": st.builds(
        CaseChecks, entry_point=word, cases=cases, metrics=metrics
    ),
    "answer": st.builds(AnswerChecks, answer=json_values),
    "command": st.builds(CommandChecks, command=line, files=sources),
    "suite": st.builds(SuiteChecks, suite=suites),
    "state": st.builds(
        StateChecks, state=st.lists(state_checks, min_size=1, max_size=2).map(tuple)
    ),
    "mutants": st.builds(
        MutantChecks, mutants=sources, reference=line, module=path
    ),
    "reward_file": st.builds(
        RewardFileChecks, command=line, reward_path=path, files=sources
    ),
}  # fmt: skip
oracles = st.lists(
    st.builds(
        OracleAction,
        name=st.sampled_from(["write_file", "shell", "edit_file", "submit"]),
        arguments=st.fixed_dictionaries({"path": path, "content": line, "command": line, "new": line}),
        thought=line,
    ),
    max_size=2,
).map(tuple)


def tasks(hidden: st.SearchStrategy[HiddenChecks] | None = None) -> st.SearchStrategy[Task]:
    """Tasks with checks from `hidden`, by default of any kind or of none."""
    return st.builds(
        Task,
        key=said,
        prompt=said,
        files=st.dictionaries(path, line, max_size=2),
        artifacts=st.lists(path, max_size=2).map(tuple),
        tools=st.none() | st.just(("read_file", "write_file", "submit")),
        limits=st.builds(Limits, max_turns=st.integers(1, 50), max_seconds=st.floats(1, 1e4)),
        check=st.none() | line,
        hidden=st.none() | st.one_of(*HIDDEN.values()) if hidden is None else hidden,
        oracle=st.none() | oracles,
        split=st.none() | st.sampled_from(Split),
        level=st.none() | st.integers(0, 9),
        family=st.none() | word,
        provenance=st.builds(
            Provenance,
            source=line,
            licence=st.none() | line,
            seed=st.none() | st.integers(0, 2**63),
            original=st.none() | st.dictionaries(word, json_values, max_size=2),
        ),
    )
