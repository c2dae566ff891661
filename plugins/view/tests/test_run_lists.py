"""Lists of runs: their order, their sums, what hosted runs used, what stays hidden, and how fast they are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from viewed import HOSTILE, hostile, log_of, run, turn

from nano_shared.errors import LogError, UsageError
from nano_shared.owners import User
from nano_shared.store import LogStore
from nano_shared.types import ApiAnswer, Share, Trajectory, Turn, Usage
from nano_view.answers import LogView

WEEK = 7 * 86_400.0


def hosted(index: int = 0, *, cost: float | None = 0.25) -> Turn:
    """A turn that an API answered."""
    usage = Usage(prompt=1000, cached=600, completion=50, cost=cost)
    made = turn(index, text_only=True)
    api = {"api": ApiAnswer(usage=usage), "policy_id": "openai:big-1"}
    return made.model_copy(update={"completion": made.completion.model_copy(update=api)})


@pytest.fixture
def view(tmp_path: Path) -> LogView:
    """Two local runs, a hosted one with a fork, and a hostile one; the first two are a week older."""
    big = {"policy": "openai:big", "directory": "/home/ann/shop", "project": "git:abc/"}
    fork = {"parent": "big", "parent_step": 1, "reward": None, **big}
    asked = {"key": "sha256:0123456789abcdef", "prompt": "Mend the cart", **big}
    return LogView(log_of(tmp_path / "log.db", [
        run("slow", at=0.0, ended=50.0, reward=0.0),
        run("odd", turn(0), turn(1), at=1.0, reward=0.5),
        run("big", hosted(), hosted(1), at=WEEK, **asked),
        run("fork", hosted(), hosted(1, cost=1.0), at=WEEK + 1, **fork),
        hostile("hostile", at=WEEK + 2),
    ]))  # fmt: skip


def ids(view: LogView, **query: str) -> list[str]:
    return [row["id"] for row in view.runs(query)["rows"]]


def test_a_list_is_in_the_order_that_is_asked_for(view: LogView) -> None:
    assert ids(view) == ["hostile", "fork", "big", "odd", "slow"]
    assert ids(view, sort="oldest") == ["slow", "odd", "big", "fork", "hostile"]
    assert ids(view, sort="best") == ["big", "odd", "slow", "hostile"], "one without a reward is left out"
    assert ids(view, sort="longest")[0] == "slow"
    assert ids(view, sort="costliest") == ["fork", "big"], "a fork's own turns count, not its parent's"
    assert ids(view, sort="most tokens")[:2] == ["big", "fork"]
    assert ids(view, project="shop") == ids(view, project="git:abc/") == ["fork", "big"]
    assert ids(view, week="1970-01-03") == ["odd", "slow"]
    with pytest.raises(UsageError, match="there are newest"):
        ids(view, sort="prettiest")


def test_an_ordered_list_comes_in_pages(tmp_path: Path) -> None:
    view = LogView(log_of(tmp_path / "log.db", [run(f"r{n:03}", reward=float(n % 3)) for n in range(230)]))
    rows: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"next": None}
    while answer["next"] or not rows:
        after = {"after": json.dumps(answer["next"])} if answer["next"] else {}
        answer = view.runs({"sort": "worst", **after})
        rows += answer["rows"]
    assert len({row["id"] for row in rows}) == len(rows) == 230
    assert [row["reward"] for row in rows] == sorted(row["reward"] for row in rows)


def test_runs_are_added_up_by_model_project_and_week(view: LogView) -> None:
    by = {name: {row["key"]: row for row in view.sums({"by": name})["rows"]} for name in ("model", "week")}
    big = by["model"]["openai:big"]
    assert [big[name] for name in ("runs", "graded", "solved", "cost", "read", "cached", "written")] == [
        2, 1, 1, 1.5, 3000, 1800, 150,
    ]  # fmt: skip
    weeks = [(row["solved"], row["solved_hosted"]) for row in by["week"].values()]
    assert (big["solved_hosted"], weeks) == (1, [(1, 1), (0, 0)])
    assert by["model"][HOSTILE]["runs"] == 1
    assert {key: row["runs"] for key, row in by["week"].items()} == {"1970-01-05": 3, "1969-12-29": 2}
    (all_of_them,) = view.sums({"reward": "zero"})["rows"]
    assert (all_of_them["runs"], all_of_them["seconds"]) == (2, 52.0)
    assert view.sums({"by": "project", "project": "shop"})["rows"][0]["directory"] == "/home/ann/shop"
    with pytest.raises(UsageError, match="week: Input should be a valid date"):
        view.sums({"week": "soon"})


def test_a_hosted_run_tells_its_usage(view: LogView) -> None:
    found = view.run({"id": "fork"})
    assert found["usage"] == {"prompt": 1000, "cached": 600, "completion": 50, "cost": 1.0}
    assert found["turns"][1]["usage"]["cached"] == 600
    assert view.run({"id": "slow"})["usage"] is None
    assert view.run({"id": "big"})["group"]["prompt"] == "Mend the cart"
    assert found["turns"][0]["policy"] == "openai:big"


def test_lists_follow_what_is_logged_judged_and_deleted(tmp_path: Path) -> None:
    store = log_of(tmp_path / "log.db", [run("a", reward=None), run("b", at=1.0)])
    view = LogView(store)
    assert ids(view, sort="best") == ["b"]
    judged = run("x", reward=3.0).verdict
    assert judged is not None
    store.add_verdict("a", judged)
    store.append(run("late", at=-5.0, reward=2.0))
    assert ids(view, sort="best") == ["a", "late", "b"]
    with sa.create_engine(f"sqlite:///{tmp_path}/log.db").begin() as connection:
        for table, column in (
            ("verdicts", "run_id"),
            ("tool_calls", "run_id"),
            ("turns", "run_id"),
            ("runs", "id"),
        ):
            connection.exec_driver_sql(f"DELETE FROM log_{table} WHERE {column} = 'b'")
    assert ids(view, sort="best") == ["a", "late"]


def test_what_its_owner_shares_with_nobody_is_in_no_list_no_group_and_no_tree_of_others(
    tmp_path: Path,
) -> None:
    def of(name: str, *turns: Turn, **changed: Any) -> Trajectory:
        return run(name, *(turns or (turn(0), turn(1))), **changed)

    forked = {"parent": "open", "parent_step": 1}
    log_of(tmp_path / "log.db", [
        of("open", owner="ann", share=Share.TEAM, reward=0.0),
        of("secret", owner="ann", share=Share.NEVER, at=1.0),
        of("secret-fork", owner="ann", share=Share.NEVER, at=2.0, **forked),
        of("fork", owner="bob", share=Share.TEAM, at=3.0, reward=0.0, **forked),
        of("below", owner="bob", share=Share.TEAM, at=4.0, parent="secret-fork", parent_step=1),
        of("alone", owner="ann", share=Share.NEVER, at=5.0, key="hidden task", policy="hidden model"),
    ]).close()  # fmt: skip

    def seen_by(name: str) -> LogView:
        return LogView(LogStore.open(tmp_path / "log.db", user=User(name=name)))

    ann, bob = seen_by("ann"), seen_by("bob")
    assert set(ids(ann)) == {"open", "secret", "secret-fork", "fork", "below", "alone"}
    assert set(ids(bob)) == {"open", "fork", "below"}
    assert {row["id"] for row in bob.run({"id": "fork"})["tree"]} == {"open", "fork"}
    assert {row["id"] for row in ann.run({"id": "fork"})["tree"]} == {"open", "fork", "secret-fork", "below"}
    everything = json.dumps([
        bob.groups({}), bob.group({"id": "fork"}), bob.group({"id": "open"}), bob.run({"id": "open"}),
        bob.sums({"by": "model"}), bob.run({"id": "fork"}), bob.runs({"text": "Do it"}),
    ])  # fmt: skip
    everything = everything.replace(
        '"parent": "secret-fork"', ""
    )  # whence a run that is bob's own was forked
    assert not [word for word in ("secret", "alone", "hidden task", "hidden model") if word in everything]
    group = bob.run({"id": "fork"})["group"]
    assert (group["runs"], group["graded"], group["mean"]) == (1, 1, 0.0), "nor is its reward in a mean"
    for name in ("secret", "secret-fork", "alone"):
        for answer in ("run", "group", "turn"):
            with pytest.raises(LogError, match="no run"):
                bob.answers[answer]({"id": name})


def many_runs(path: Path, count: int) -> LogStore:
    """A log of copies of a local and of a hosted run of two turns, with different ids, times and rewards."""
    store = log_of(
        path, [run("local", turn(0), turn(1)), run("hosted", hosted(), hosted(1), policy="openai:big")]
    )
    series = f"WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {count})"
    with sa.create_engine(f"sqlite:///{path}").begin() as connection:
        for table, name in (("runs", "id"), ("turns", "run_id"), ("verdicts", "run_id")):
            names = [c["name"] for c in sa.inspect(connection).get_columns(f"log_{table}")]
            new = {name: "printf('r%07d', s.n)", "started": "s.n * 60.0", "ended": "s.n * 60.0 + s.n % 97",
                   "reward": "(s.n % 5) / 4.0"}  # fmt: skip
            if table == "verdicts":
                names.remove("id")
            taken = ", ".join(new.get(n, f"t.{n}") for n in names)
            which = f"t.{name} = CASE WHEN s.n % 10 THEN 'local' ELSE 'hosted' END"
            connection.exec_driver_sql(
                f"{series} INSERT INTO log_{table} ({', '.join(names)})"
                f" SELECT {taken} FROM s, log_{table} t WHERE {which}"
            )
    return store


@pytest.mark.slow
def test_a_hundred_thousand_runs_are_sorted_filtered_and_added_up_in_half_a_second(tmp_path: Path) -> None:
    store = many_runs(tmp_path / "log.db", 100_000)
    view = LogView(store)

    def cpu(name: str, **query: str) -> float:
        began = time.process_time()
        assert view.answers[name](query)["rows"]
        return time.process_time() - began

    took = {"first": cpu("runs")}
    for sort in ("newest", "oldest", "best", "worst", "costliest", "longest", "most tokens"):
        took[sort] = cpu("runs", sort=sort)
    took["filtered"] = cpu("runs", sort="longest", policy="openai:big", reward="zero", week="1970-02-04")
    took["groups"] = cpu("groups")
    for by in ("model", "project", "week"):
        took[by] = cpu("sums", by=by)
    store.append(run("new", at=1e9))
    took["after a run"] = cpu("runs")
    print({name: round(seconds, 3) for name, seconds in took.items()})
    first = took.pop("first")  # reads the log once
    assert first < 30
    assert max(took.values()) < 0.5, took
