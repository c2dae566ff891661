"""What a log can teach: the use of each run, what the report counts, and what is said of bad input."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import FAIL, SOLVE, build_model, recorded

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models import opening as models
from nano_coder.models.opening import open_weights
from nano_coder.verify.tokens import Scored
from nano_coder.verify.trainable import RefusalCode, blocking
from nano_rl.cli import cli
from nano_rl.logs.admission import (
    AdmissionReport,
    ImportanceWeights,
    JudgedRun,
    TargetPolicy,
    Use,
    by_task,
)
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.owners import User
from nano_shared.run_facts import facts_of, moment
from nano_shared.schema import VERSION_TABLE
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Sampling,
    Share,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)

torch.set_num_threads(1)


def a_run(
    name: str, reward: float | None, *, key: str = "t", tokens: bool = True, **changes: Any
) -> Trajectory:
    """A run of one turn that submits; `version` and `trust` besides the fields of a trajectory."""
    version, trust = changes.pop("version", 0), changes.pop("trust", Trust.HIDDEN)
    ids = TurnTokens(context_ids=(1, 2, 3), sampled_ids=(4, 5), logprobs=(-0.5, -0.1))
    completion = Completion(
        text="@submit", finish=Finish.STOP, tokens=ids if tokens else None, sampling=Sampling(),
        policy_id="weights", policy_version=version,
    )  # fmt: skip
    started = float(sum(map(ord, name)))  # of each run its own: two that began together are copies
    turn = Turn(
        index=0, completion=completion, calls=(ToolCall(name="submit"),), parser="compact", started=started,
        ended=started + 1,
    )  # fmt: skip
    verdict = Verdict(reward=reward, trust=trust, grader="test 1", graded_hash="-")
    fields = {
        "id": name, "task": Task(key=key, prompt="Do it."), "turns": (turn,), "stop": StopReason.FINISHED,
        "runtime_version": "0", "profile": COMPACT_1.name, "profile_hash": COMPACT_1.hash,
        "tools_hash": COMPACT_1.tools_hash, "template_hash": "t", "policy": "p", "started": started,
        "verdict": verdict,
    }  # fmt: skip
    return Trajectory(**fields | changes)


def judged(runs: Sequence[Trajectory], target: TargetPolicy | None = None) -> list[list[JudgedRun]]:
    return list(by_task(map(facts_of, runs), target or TargetPolicy()))


def uses(
    runs: Sequence[Trajectory], target: TargetPolicy | None = None
) -> dict[str, tuple[Use, RefusalCode | None]]:
    return {j.run.id: (j.use, j.refusal) for group in judged(runs, target) for j in group}


# ------------------------------------------------------------------------------------ uses


def test_runs_that_differ_train_a_policy_gradient() -> None:
    found = uses([a_run("a", 1.0), a_run("b", 0.0), a_run("c", 0.0)])
    assert set(found.values()) == {(Use.POLICY_GRADIENT, None)}


def test_a_lone_success_is_imitated_and_a_lone_failure_teaches_nothing() -> None:
    assert uses([a_run("a", 1.0, key="x"), a_run("b", 0.0, key="y")]) == {
        "a": (Use.IMITATION, RefusalCode.LONE),
        "b": (Use.NOTHING, RefusalCode.LONE),
    }


def test_a_group_that_earned_the_same_is_compared_with_nothing() -> None:
    found = uses([a_run("a", 1.0), a_run("b", 1.0)])
    assert set(found.values()) == {(Use.IMITATION, RefusalCode.SAME_REWARD)}


def test_text_only_runs_that_differ_are_a_preference() -> None:
    found = uses([a_run("a", 1.0, tokens=False), a_run("b", 0.0, tokens=False)])
    assert set(found.values()) == {(Use.PREFERENCE, RefusalCode.TEXT_ONLY)}


def test_runs_of_two_templates_make_no_pair() -> None:
    target = TargetPolicy(template_hash="mine")
    found = uses([a_run("a", 1.0, template_hash="x"), a_run("b", 0.0, template_hash="y")], target)
    assert found == {
        "a": (Use.IMITATION, RefusalCode.ANOTHER_TEMPLATE),
        "b": (Use.NOTHING, RefusalCode.ANOTHER_TEMPLATE),
    }


def test_what_somebody_said_makes_a_preference() -> None:
    run = facts_of(a_run("a", None))
    assert [j.use for g in by_task([run], TargetPolicy()) for j in g] == [Use.NOTHING]
    assert [j.use for g in by_task([replace(run, opinions=True)], TargetPolicy()) for j in g] == [
        Use.PREFERENCE
    ]


def test_staleness_is_counted_in_optimizer_steps() -> None:
    runs = [a_run("a", 1.0, version=10), a_run("b", 0.0, version=10), a_run("c", 1.0, version=5)]
    found = uses(runs, TargetPolicy(version=12, max_staleness=2))
    assert found["c"] == (Use.PREFERENCE, RefusalCode.STALE)
    assert found["a"] == (Use.POLICY_GRADIENT, None)
    assert uses(runs, TargetPolicy(version=12))["c"] == (Use.POLICY_GRADIENT, None)


def test_of_two_tasks_under_one_key_the_later_is_the_task() -> None:
    old = [a_run(name, 1.0, task=Task(key="t", prompt="Before.")) for name in ("a", "b")]
    new = [
        a_run(name, reward, task=Task(key="t", prompt="Now.")) for name, reward in (("c", 1.0), ("d", 0.0))
    ]
    found = uses([*old, *new])
    assert [found[name] for name in "ab"] == [(Use.NOTHING, RefusalCode.OTHER_TASK)] * 2
    assert [found[name] for name in "cd"] == [(Use.POLICY_GRADIENT, None)] * 2


def test_a_seed_that_is_used_again_draws_nothing_new() -> None:
    def seeded(name: str, seed: int) -> Trajectory:
        run = a_run(name, 1.0)
        completion = run.turns[0].completion.model_copy(update={"sampling": Sampling(seed=seed)})
        return run.model_copy(update={"turns": (run.turns[0].model_copy(update={"completion": completion}),)})

    found = uses([seeded("a", 7), seeded("b", 7), seeded("c", 8), a_run("d", 0.0)])
    assert found["b"] == (Use.NOTHING, RefusalCode.DUPLICATE)
    assert found["a"] == found["c"] == (Use.POLICY_GRADIENT, None)


# ------------------------------------------------------------------------------------ the report


def reported(runs: Sequence[Trajectory]) -> dict[str, Any]:
    report = AdmissionReport()
    for group in judged(runs):
        report.add(group)
    assert list(report.lines())
    return report.as_dict()


def test_the_report_counts_runs_groups_tokens_and_trust() -> None:
    report = reported(
        [a_run("a", 1.0), a_run("b", 0.0), a_run("c", 0.5),
         a_run("g", 1.0, trust=Trust.JUDGE), a_run("h", 1.0, verdict=None),
         a_run("d", 1.0, key="lone"), a_run("e", 1.0, key="same"), a_run("f", 1.0, key="same")]
    )  # fmt: skip
    assert (report["runs"], report["tasks"], report["tokens"]) == (8, 3, 6)
    assert report["uses"]["policy gradient"] == 3
    assert sum(report["uses"].values()) == 8
    assert {r["code"]: r["runs"] for r in report["refusals"]} == {
        "low trust": 1, "no verdict": 1, "lone in its group": 1, "all of its group earned the same": 2,
    }  # fmt: skip
    assert report["groups"] == {"comparable": 1, "lone": 1, "same reward": 1}
    assert report["trust"] == {"hidden": 6, "judge": 1, "no verdict": 1}


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=40))
def test_the_effective_share_lies_between_one_row_and_all(logs: list[float]) -> None:
    share = ImportanceWeights(runs=logs).run_share
    assert 1 / len(logs) <= share * (1 + 1e-9)
    assert share <= 1 + 1e-9
    assert ImportanceWeights(runs=[value + 3.0 for value in logs]).run_share == pytest.approx(share)


def test_equal_weights_lose_nothing_and_one_heavy_weight_almost_all() -> None:
    sample = ImportanceWeights()
    sample.add([Scored(turn=0, recorded=-1.0, recomputed=-1.0)] * 4)
    assert (sample.token_share, sample.run_share) == (1.0, 1.0)
    sample.add([Scored(turn=0, recorded=-12.0, recomputed=-2.0)])
    assert sample.token_share == pytest.approx(1 / 5, abs=1e-3)
    assert sample.run_share == pytest.approx(1 / 2, abs=1e-3)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 10_000 - 5400), ("1d", 10_000 - 86400), ("1700000000", 1.7e9)]
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert moment(text, now=10_000) == seconds


def test_dates_are_times() -> None:
    assert moment("2026-11-21", now=0) < moment("2026-11-21T09:30", now=0)
    assert moment("1970-01-01T00:00:10+00:00", now=0) == 10


@pytest.mark.parametrize("text", ["", "yesterday", "7 fortnights", "2026-13-40", "-3d", "1e9"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--since .* is no time; write a date"):
        moment(text, now=0)


# ------------------------------------------------------------------------------------ the command


def run_admit(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        run_command(cli, ["admit", *arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SHIPPED", tmp_path / "nothing is shipped")
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))


@pytest.fixture
def small_log(tmp_path: Path) -> str:
    with LogStore.open(tmp_path / "log.db") as store:
        for run in (a_run("a", 1.0), a_run("b", 0.0), a_run("c", 1.0, key="other-1")):
            store.append(run)
        store.add_feedback("c", Feedback(kind=FeedbackKind.ACCEPT, created=1.0))
    return str(tmp_path / "log.db")


def test_without_a_model_the_report_says_so_and_gives_all_else(
    no_model: None, small_log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_admit("--log", small_log, "--json", "--max-staleness", "1", "--exact") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["uses"] == {"policy gradient": 2, "preference": 1, "imitation": 0, "nothing": 0}
    assert (report["policy"], report["effective_sample_size"], report["token_checks"]) == (None, None, None)
    (note,) = report["notes"]
    assert "no model is at hand" in note
    assert "--max-staleness" in note
    assert run_admit("--log", small_log) == 0
    assert "note: no model is at hand" in capsys.readouterr().out


def test_filters_choose_runs_and_an_empty_choice_is_said(
    no_model: None, small_log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_admit("--log", small_log, "--json", "--task", "other-*") == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 1
    assert run_admit("--log", small_log, "--json", "--policy", "nobody") == 0
    assert any("no run of the log matches" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--since", "whenever"], "is no time; write a date"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--max-staleness", "-1"], "--max-staleness"),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: list[str], reason: str, small_log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_admit("--log", small_log, *arguments) == 2
    told = capsys.readouterr()
    assert reason in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_a_log_that_is_not_there_and_one_of_a_newer_nano(
    tmp_path: Path, small_log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_admit("--log", str(tmp_path / "none.db")) == 2
    assert "there is no log at" in capsys.readouterr().err
    with closing(sqlite3.connect(small_log)) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
        connection.commit()
    assert run_admit("--log", small_log) == 2
    assert "newer nano (schema 9999" in capsys.readouterr().err


def test_under_the_policy_that_sampled_the_log_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_model(tmp_path / "model")
    recorded(open_weights(str(model)), tmp_path, SOLVE, FAIL)
    arguments = ("--log", str(tmp_path / "log.db"), "--json", "--seed", "1")
    assert run_admit(*arguments, "--model", str(model), "--exact") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["uses"]["policy gradient"] == 2
    assert report["token_checks"] == {"runs": 2, "damage": {}}
    assert report["effective_sample_size"]["of_tokens"] == pytest.approx(1.0, abs=1e-4)
    assert report["effective_sample_size"]["sampled_tokens"] == report["tokens"]

    other = build_model(tmp_path / "other", seed=1)
    assert run_admit(*arguments, "--model", str(other)) == 0
    stale = json.loads(capsys.readouterr().out)["effective_sample_size"]
    assert 0 < stale["of_tokens"] < 0.9
    assert stale["effective_tokens"] == pytest.approx(stale["of_tokens"] * report["tokens"])


def test_runs_of_others_teach_where_their_owners_let_them(
    tmp_path: Path, no_model: None, capsys: Any
) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        for number, share in enumerate((None, *Share)):
            owner = "me" if share is None else f"{share}@host"
            for reward in (0.0, 1.0):
                store.append(a_run(f"{owner}-{reward}", reward, owner=owner, share=share, seed=number))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NANO_OWNER", "me")
        assert run_admit("--log", str(tmp_path / "log.db"), "--json") == 0
    refused = Counter[str]()
    with LogStore.open(tmp_path / "log.db", user=User(name="me")) as store:
        for facts in store.facts():
            refused.update(code.value for code in blocking(facts) if code.bars)
    assert refused == {"no consent": 2}
    report = json.loads(capsys.readouterr().out)
    assert report["uses"] == {"policy gradient": 4, "preference": 0, "imitation": 0, "nothing": 2}
    (refusal,) = report["refusals"]
    assert (refusal["code"], refusal["runs"], refusal["damage"]) == ("no consent", 2, False)
