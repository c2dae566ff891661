"""A log copied into another is the same log, on either database, and the copy may be repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from log_values import a_run, a_turn, a_verdict, trajectories
from postgres_server import PostgresServer
from typer.testing import CliRunner

from nano_cluster.log_copy import Copied, copy_into
from nano_coder.commands.log import command
from nano_shared.errors import LogError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Trajectory

EVERYTHING = list(HealthCheck)


@pytest.fixture(params=["sqlite to postgres", "postgres to sqlite", "sqlite to sqlite"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[LogStore, LogStore]]:
    """An empty source and an empty target, each with a folder of blobs of its own."""
    opened = []
    for side, kind in enumerate(request.param.split(" to ")):
        address = str(tmp_path / str(side) / "log.db")
        if kind == "postgres":
            server: PostgresServer = request.getfixturevalue("postgres_server")
            address = f"{server.new_database(migrated=True)}&blobs={tmp_path / str(side) / 'blobs'}"
        opened.append(LogStore.open(address))
    yield opened[0], opened[1]
    for store in opened:
        store.close()


def copied(source: LogStore, target: LogStore) -> Copied:
    done = Copied()
    copy_into(target, source, done)
    return done


@pytest.mark.some(4)
@settings(max_examples=10, deadline=None, suppress_health_check=EVERYTHING)
@given(run=trajectories())
def test_any_run_arrives_equal(logs: tuple[LogStore, LogStore], run: Trajectory) -> None:
    source, target = logs
    if any(known.id == run.id for known in source.runs()):
        return
    source.append(run)
    assert copied(source, target).runs == 1
    assert target.logged(run.id) == source.logged(run.id)
    assert copied(target, source).runs == 0  # and back: nothing differs


def test_a_copy_is_repeated_and_takes_what_is_new(logs: tuple[LogStore, LogStore]) -> None:
    source, target = logs
    blob = source.put_blob(b"much output")
    for number in range(120):
        source.append(
            a_run(
                f"r{number:03}", turns=(a_turn(0), a_turn(1)), stop=StopReason.FINISHED, verdict=a_verdict()
            )
        )
    source.begin(a_run("open"))
    source.append_turn("open", a_turn(0))
    said = Feedback(kind=FeedbackKind.NOTE, text="good", created=1.0)
    source.add_feedback("r000", said)
    first = copied(source, target)
    assert (first.runs, first.turns, first.blobs, first.known) == (121, 241, 1, 0)
    assert target.get_blob(blob) == b"much output"
    assert list(target.trajectories()) == list(source.trajectories())

    again = copied(source, target)
    assert (again.runs, again.extended, again.known, again.blobs, again.known_blobs) == (0, 0, 121, 0, 1)

    source.append_turn("open", a_turn(1))
    source.finish("open", stop=StopReason.GAVE_UP, ended=9.0, answer="no", diff="\0 odd")
    source.add_verdict("r001", a_verdict(0.25, grader="later/1"))
    source.append(a_run("new"))
    target.add_verdict("r002", a_verdict(0.5, grader="theirs/1"))
    later = copied(source, target)
    assert (later.runs, later.turns, later.extended, later.known) == (1, 1, 2, 119)
    assert target.get("open") == source.get("open")
    assert target.verdicts("r001") == source.verdicts("r001")
    assert target.feedback("r000") == (said,)
    assert [verdict.grader for verdict in target.verdicts("r002")] == ["cases/1", "theirs/1"]


def test_another_run_of_the_same_id_is_refused_before_anything_is_written(
    logs: tuple[LogStore, LogStore],
) -> None:
    source, target = logs
    source.put_blob(b"x")
    for name in ("a", "b", "c"):
        source.append(a_run(name, turns=(a_turn(0),), stop=StopReason.FINISHED))
    target.append(a_run("c", turns=(a_turn(0, tokens=False),), stop=StopReason.FINISHED))
    with pytest.raises(LogError, match=r"run c is in log .* with another content; nothing was copied"):
        copied(source, target)
    assert [run.id for run in target.runs()] == ["c"]
    assert list(target.blobs.ids()) == []


def test_a_run_with_a_result_gains_no_turns(logs: tuple[LogStore, LogStore]) -> None:
    source, target = logs
    source.append(a_run("a", turns=(a_turn(0), a_turn(1)), stop=StopReason.FINISHED))
    target.append(a_run("a", turns=(a_turn(0),), stop=StopReason.FINISHED))
    with pytest.raises(LogError, match="another content"):
        copied(source, target)


def test_a_run_that_was_interrupted_and_went_on(logs: tuple[LogStore, LogStore]) -> None:
    source, target = logs
    source.append(a_run("a", turns=(a_turn(0),), stop=StopReason.INTERRUPTED, ended=2.0))
    copied(source, target)
    source.reopen("a")
    source.append_turn("a", a_turn(1))
    source.finish("a", stop=StopReason.FINISHED, ended=5.0)
    assert copied(source, target).extended == 1
    assert target.get("a") == source.get("a")
    assert copied(target, source).known == 1


def test_a_damaged_blob_is_left_out_and_named(logs: tuple[LogStore, LogStore]) -> None:
    source, target = logs
    whole, broken = source.put_blob(b"whole"), source.put_blob(b"broken")
    source.blobs.path(broken).write_bytes(b"rubbish")
    done = copied(source, target)
    assert done.blobs == 1
    assert len(done.damaged_blobs) == 1
    assert broken in done.damaged_blobs[0]
    assert target.get_blob(whole) == b"whole"
    assert broken not in target.blobs


def test_an_interrupted_copy_is_finished_by_the_next(
    logs: tuple[LogStore, LogStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = logs
    for number in range(120):
        source.append(a_run(f"r{number:03}", turns=(a_turn(0),)))

    def stop(_runs: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_into(target, source, Copied(), stop)
    there = len(target.runs())
    assert 0 < there < 120
    done = copied(source, target)
    assert (done.runs, done.known) == (120 - there, there)
    assert list(target.trajectories()) == list(source.trajectories())


def test_the_command_counts_and_names_damage(logs: tuple[LogStore, LogStore]) -> None:
    source, target = logs
    source.append(a_run("a", turns=(a_turn(0), a_turn(1))))
    source.put_blob(b"whole")
    source.blobs.path(source.put_blob(b"broken")).write_bytes(b"rubbish")

    def migrate(*options: str) -> Result:
        return CliRunner().invoke(
            command, ["migrate", source.address, target.address, *options], standalone_mode=False
        )

    first = migrate()
    assert first.stdout == "copied 1 runs, 2 turns and 1 blobs; 1 damaged blobs were left out\n"
    assert "left out: blob sha256:" in first.stderr
    assert first.return_value == 1
    again = json.loads(migrate("--json").stdout)
    assert (again["runs"], again["known"], again["blobs"], again["known_blobs"]) == (0, 1, 0, 1)
    assert target.get("a") == source.get("a")
