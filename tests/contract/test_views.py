"""The views a person queries: documented, complete, and right."""

import re
from pathlib import Path

import pytest
from log_values import a_run, a_turn, a_verdict

from nano_shared import database
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.store import LogStore
from nano_shared.types import StopReason, ToolCall

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def store(tmp_path):
    with LogStore.open(tmp_path / "log.db") as opened:
        yield opened


def test_every_column_of_the_views_of_the_design_is_documented(store):
    text = Path(database.__file__).with_name("views.sql").read_text()
    views = re.findall(r"CREATE VIEW (\w+) AS SELECT\n(.*?)\nFROM", text, re.DOTALL)
    assert [name for name, _ in views] == [
        "runs", "turns", "requests", "tool_calls", "verdicts", "feedback",
    ]  # fmt: skip
    for name, lines in views:
        documented = re.findall(r"(\w+),?  -- \S", lines)
        assert store.sql(f"SELECT * FROM {name}").columns == tuple(documented)


def test_a_run_shows_its_newest_verdict_and_its_sums(store):
    store.append(a_run(turns=(a_turn(0), a_turn(1)), stop=StopReason.FINISHED, ended=9.0))
    for verdict in (a_verdict(0.0), a_verdict(0.5)):
        store.add_verdict("run1", verdict)
    query = "SELECT reward, turns, context_tokens, sampled_tokens, trainable, seconds, policy_id FROM runs"
    assert store.sql(query).rows == [(0.5, 2, 6, 4, 1, 8.0, "weights")]


def test_no_verdict_and_no_reward_are_null_not_zero(store):
    store.begin(a_run("none"))
    store.append(a_run("excluded", verdict=a_verdict(None)))
    rows = store.sql("SELECT id, reward, grader FROM runs ORDER BY id").rows
    assert rows == [("excluded", None, "cases/1"), ("none", None, None)]


def test_success_by_policy(store):
    for number, reward in enumerate([1.0, 0.0, None]):
        store.append(a_run(f"r{number}", verdict=a_verdict(reward)))
    rows = store.sql("SELECT policy, avg(reward), count(*) FROM runs GROUP BY policy").rows
    assert rows == [("policy", 0.5, 3)]


def test_tool_calls_show_what_never_ran(store):
    unanswered = ToolCall(name="submit", arguments={})
    answered = a_turn(0)
    store.append(a_run(turns=(a_turn(0, calls=(*answered.calls, unanswered)),)))
    rows = store.sql("SELECT position, tool, ok, exit_code, denied_network FROM tool_calls").rows
    assert rows == [(0, "shell", 1, 0, 0), (1, "submit", None, None, None)]


def test_feedback_joins_its_run(store):
    store.begin(a_run())
    store.add_feedback("run1", Feedback(kind=FeedbackKind.THUMB, value=1.0, created=2.0))
    query = "SELECT r.task_key, f.kind, f.value FROM feedback f JOIN runs r ON r.id = f.run_id"
    assert store.sql(query).rows == [("sum", "thumb", 1.0)]
