"""Deleting runs: their rows and what only they need go, and nothing that another run needs, now or soon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from log_values import a_run, a_turn, a_verdict

from nano_logs.deletion import Deletion, delete_runs, plan_deletion
from nano_shared import schema, snapshot
from nano_shared.errors import LogError, UsageError
from nano_shared.logged_run import Feedback, FeedbackKind, workspace_edit
from nano_shared.snapshot import KEPT_SECONDS, BlobStore
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Task, Trajectory

SHARED = {"shared.py": "everybody's\n"}


def workspace(store: LogStore, **files: str) -> str:
    return snapshot.snapshot_texts({**SHARED, **files}, store.blobs)


def a_logged_run(store: LogStore, name: str, **changes: object) -> Trajectory:
    """A run with a workspace before and after it, of which one file is its own."""
    start, after = workspace(store), workspace(store, **{f"{name}.py": name})
    turn = a_turn().model_copy(update={"snapshot": after})
    task = Task(key=f"task-{name}", prompt="p", snapshot=start)
    run = a_run(name, task=task, turns=(turn,), snapshot=start, stop=StopReason.FINISHED, ended=2.0)
    run = run.model_copy(update={"verdict": a_verdict(1.0), **changes})
    store.append(run)
    return store.get(name)


def age(blobs: BlobStore) -> None:
    """As if all blobs had been put two hours ago."""
    before = time.time() - 2 * KEPT_SECONDS
    for blob in blobs.ids():
        os.utime(blobs.path(blob), (before, before))


def rows(store: LogStore) -> dict[str, int]:
    tables = (table for table in schema.metadata.sorted_tables if table is not schema.given_tools)
    count = sa.select(sa.func.count())
    return {t.name: store.read(lambda c, t=t: c.scalar(count.select_from(t))) for t in tables}


def test_a_run_goes_with_what_only_it_needs(log: str) -> None:
    with LogStore.open(log) as store:
        one, two = a_logged_run(store, "one"), a_logged_run(store, "two")
        edit = workspace(store, **{"edited.py": "x"})
        said = Feedback(kind=FeedbackKind.EDIT, text=workspace_edit(edit, "diff"), created=1.0)
        store.add_feedback("one", said)
        age(store.blobs)
        plan = plan_deletion(store, ["one"])
        done = delete_runs(store, ["one"])
        # a workspace and its file, as the run and as its user left it
        assert (plan.runs, plan.blobs, done) == (1, 4, Deletion(runs=1, blobs=4, bytes=done.bytes))
        assert 0 < done.bytes < plan.bytes
        with pytest.raises(LogError, match="no run"):
            store.get("one")
        assert store.get("two") == two
        for tree in (two.snapshot, two.last_snapshot):
            snapshot.load(str(tree), store.blobs)
            assert all(blob in store.blobs for blob in snapshot.blobs_of(str(tree), store.blobs))
        assert one.last_snapshot not in store.blobs
        kept = rows(store)
        assert (kept["log_tasks"], kept["log_runs"], kept["log_verdicts"], kept["log_feedback"]) == (
            1,
            1,
            1,
            0,
        )
        delete_runs(store, ["two"])
        assert set(rows(store).values()) == {0}
        assert list(store.blobs.ids()) == []


def test_what_was_put_within_the_last_hour_goes_with_a_later_deletion(log: str) -> None:
    with LogStore.open(log) as store:
        run, _ = a_logged_run(store, "one"), a_logged_run(store, "two")
        assert delete_runs(store, ["one"]).left == 2
        assert run.last_snapshot in store.blobs
        age(store.blobs)
        delete_runs(store, ["two"])
        assert list(store.blobs.ids()) == []


def test_a_deletion_that_is_interrupted_is_ended_by_the_next(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogStore.open(log) as store:
        for name in ("one", "two"):
            a_logged_run(store, name)
        age(store.blobs)
        with monkeypatch.context() as patched:
            patched.setattr(BlobStore, "remove", _killed)
            with pytest.raises(KeyboardInterrupt):
                delete_runs(store, ["one"])
        assert [run.id for run in store.runs()] == ["two"]
        delete_runs(store, ["two"])
        assert list(store.blobs.ids()) == []


def _killed(*_given: object) -> int:
    raise KeyboardInterrupt


WRITER = """
import sys
from log_values import a_run, a_turn
from nano_shared import snapshot
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Task

with LogStore.open(sys.argv[1]) as store:
    # the same files as those of the run that is deleted meanwhile
    start = snapshot.snapshot_texts({"shared.py": "everybody's\\n", "one.py": "one"}, store.blobs)
    print("put", flush=True)
    sys.stdin.readline()
    run = a_run("writer", task=Task(key="t", prompt="p", snapshot=start), snapshot=start)
    with store.claim("writer"):
        store.begin(run)
        print("begun", flush=True)
        sys.stdin.readline()
        after = snapshot.snapshot_texts({"shared.py": "everybody's\\n", "new.py": "new"}, store.blobs)
        store.append_turn("writer", a_turn().model_copy(update={"snapshot": after}))
        store.finish("writer", stop=StopReason.FINISHED, ended=9.0)
"""


def test_nothing_goes_that_a_process_needs_which_runs_meanwhile(log: str) -> None:
    with LogStore.open(log) as store:
        for name in ("one", "two", "three"):
            a_logged_run(store, name)
        age(store.blobs)
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, log], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as writer:  # fmt: skip
            assert writer.stdout is not None
            assert writer.stdin is not None
            assert writer.stdout.readline() == "put\n"
            assert delete_runs(store, ["one"]).left == 2, "the writer has put them again"
            writer.stdin.write("\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "begun\n"
            age(store.blobs)
            delete_runs(store, ["two"])
            with pytest.raises(LogError, match="being executed by another process"):
                delete_runs(store, ["writer"])
            writer.stdin.write("\n")
            writer.stdin.flush()
            assert writer.wait(60) == 0
        age(store.blobs)
        delete_runs(store, ["three"])
        run = store.get("writer")
        assert store.check_blobs("writer", set()) is None
        for tree in (run.snapshot, run.last_snapshot):
            assert all(blob in store.blobs for blob in snapshot.blobs_of(str(tree), store.blobs))


def test_a_run_that_others_go_on_from_goes_with_them_alone(log: str) -> None:
    with LogStore.open(log) as store:
        a_logged_run(store, "one")
        a_logged_run(store, "two", parent="one", parent_step=1)
        for step in (plan_deletion, delete_runs):
            with pytest.raises(UsageError, match="run two begins with the turns of one: delete both"):
                step(store, ["one"])
        assert len(store.runs()) == 2
        assert delete_runs(store, ["one", "two"]).runs == 2


def test_a_log_beside_it_keeps_its_blobs(tmp_path: Path) -> None:
    (tmp_path / "other.db").write_text("no database")
    with LogStore.open(tmp_path / "log.db") as store, LogStore.open(tmp_path / "second.db") as second:
        run = a_logged_run(store, "one")
        second.append(run.model_copy(update={"id": "copy"}))
        age(store.blobs)
        assert delete_runs(store, ["one"]).blobs == 0
        assert run.last_snapshot in store.blobs


def test_a_blob_that_is_put_again_is_young_again(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    blob = blobs.put(b"x")
    assert blobs.remove(blob) is None
    age(blobs)
    blobs.put(b"x")
    assert blobs.remove(blob) is None
    age(blobs)
    assert (blobs.remove(blob), blobs.remove(blob), blob in blobs) == (9, 0, False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
