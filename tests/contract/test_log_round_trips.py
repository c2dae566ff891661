"""What leaves the log by `jsonl`, ATIF or NeMo Gym comes back equal, whatever it holds."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from log_values import a_run, a_turn, a_verdict, texts, trajectories, verdicts

from nano_coder.run_formats import read_log, write_log
from nano_formats import atif
from nano_formats.nemo_gym import rollouts as nemo_gym
from nano_shared.logged_run import Feedback, FeedbackKind, LoggedRun
from nano_shared.run_facts import RunFilter
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore
from nano_shared.types import Message, Role, Verdict

feedback = st.builds(
    Feedback,
    kind=st.sampled_from([FeedbackKind.NOTE, FeedbackKind.ACCEPT]),
    text=st.none() | texts,
    turn=st.none() | st.integers(0, 5),
    created=st.floats(allow_nan=False, allow_infinity=False),
)


@st.composite
def logged_runs(draw: st.DrawFn) -> LoggedRun:
    judged = tuple(draw(st.lists(verdicts, max_size=2)))
    said = tuple(draw(st.lists(feedback, max_size=2)))
    run = draw(trajectories()).model_copy(update={"verdict": judged[-1] if judged else None})
    return LoggedRun(trajectory=run, verdicts=judged, feedback=said)


quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
OPENING = (Message(role=Role.SYSTEM, content="act"), Message(role=Role.USER, content="do it"))


@quick
@given(st.lists(logged_runs(), max_size=3))
def test_our_own_lines_come_back_equal(runs: list[LoggedRun]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "runs.jsonl"
        missing: set[str] = set()
        rows = write_log(runs, BlobStore(folder / "blobs"), missing)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert [run for _, run in read_log(file, None)] == runs


@quick
@given(logged_runs())
def test_atif_comes_back_equal(run: LoggedRun) -> None:
    row = json.loads(json.dumps(atif.write(run, OPENING)))
    assert list(atif.read(row)) == [run]


@quick
@given(logged_runs())
def test_a_rollout_of_nemo_gym_comes_back_equal(run: LoggedRun) -> None:
    row = json.loads(json.dumps(nemo_gym.write(run, OPENING)))
    assert list(nemo_gym.read(row | {"_ng_task_index": 3})) == [run]


@pytest.mark.usefixtures("backend")
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(logged_runs())
def test_a_log_gains_each_run_once_and_later_judgements_beside_it(run: LoggedRun) -> None:
    with tempfile.TemporaryDirectory() as name, LogStore.open(Path(name) / "log.db") as store:
        assert store.merge(lambda: [run]).added == 1
        # where it was made is no directory of this machine's
        bare = run.trajectory.model_copy(update={"directory": None})
        assert store.logged(run.trajectory.id) == run.model_copy(update={"trajectory": bare})
        assert store.merge(lambda: [run]).known == 1
        later = a_verdict(0.25, grader="another/1")
        assert (
            store.merge(lambda: [run.model_copy(update={"verdicts": (*run.verdicts, later)})]).extended == 1
        )
        assert store.verdicts(run.trajectory.id) == (*run.verdicts, later)


@pytest.mark.usefixtures("backend")
def test_ids_cover_the_log_in_order(tmp_path: Path) -> None:
    count = 503
    with LogStore.open(tmp_path / "log.db") as store:
        runs = [LoggedRun(trajectory=a_run(f"r{i:04}", started=float(i // 7))) for i in range(count)]
        store.merge(lambda: runs)
        assert [run for run, _ in store.ids()] == [run.trajectory.id for run in runs]
        assert [run for run, _ in store.ids(RunFilter(since=70.0), by_task=True)] == [
            f"r{i:04}" for i in range(490, count)
        ]


def test_turns_of_one_row_are_written_with_all_they_read_before(tmp_path: Path) -> None:
    run = LoggedRun(trajectory=a_run(turns=(a_turn(0), a_turn(1), a_turn(2, tokens=False))))
    first, second, third = (s for s in atif.write(run)["steps"] if s["source"] == "agent")
    assert first["metrics"]["prompt_token_ids"] == [1, 2, 3]
    assert second["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert second["metrics"]["completion_token_ids"] == [4, 5]
    assert "metrics" not in third


def test_half_a_surrogate_pair_in_the_name_of_a_check_is_written_out_and_survives() -> None:
    verdict = Verdict.model_validate(a_verdict().model_dump() | {"checks": {"a\ude4fb": "pass"}})
    assert list(verdict.checks) == ["a\\ude4fb"]
    run = LoggedRun(trajectory=a_run(verdict=verdict), verdicts=(verdict,))
    assert list(atif.read(json.loads(json.dumps(atif.write(run))))) == [run]
