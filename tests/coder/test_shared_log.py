"""Commands on a log that several people share: `last`, `apply`, `log list`, `delete`, `prune` and `stats`."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executions import a_runtime, a_task, act

from nano_coder.cli import cli
from nano_coder.commands import changes
from nano_coder.run.execution import Project, grade_run, run_task
from nano_shared.checkpoint import Manifest, TrainedOn, write_manifest
from nano_shared.command_line import run_command
from nano_shared.files import checkpoints_dir
from nano_shared.owners import User
from nano_shared.snapshot import KEPT_SECONDS, snapshot_directory
from nano_shared.store import LogStore
from nano_shared.types import (
    ApiAnswer,
    Completion,
    Finish,
    Sampling,
    Share,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    Usage,
    Verdict,
)

ANN, CEM = "ann@a", "cem@c"
Nano = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nano:
    """A command of Ann's, or of whom NANO_OWNER names."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def call(*arguments: str | Path, by: str = ANN) -> tuple[int, str, str]:
        monkeypatch.setenv("NANO_OWNER", by)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(cli, [str(argument) for argument in arguments])
        return int(end.value.code or 0), *capsys.readouterr()

    return call


def a_run_in(folder: Path, owner: str, word: str, home: Path, share: Share = Share.TEAM) -> Trajectory:
    """A run that writes a word into a.py of a folder, which has one line there, and is not applied."""
    folder.mkdir(exist_ok=True)
    if not (folder / "a.py").exists():
        (folder / "a.py").write_text("one\n")
    runtime = a_runtime(home, [act("write_file", path="a.py", content=f"{word}\n"), act("submit")])
    runtime.store.user = User(name=owner, share=share)
    runtime = replace(runtime, project=Project(directory=str(folder)))
    start = snapshot_directory(folder, runtime.store.blobs)
    task = a_task(files={}, snapshot=start, check=f"grep -q {word} a.py")
    with runtime.store:
        return grade_run(run_task(task, runtime), runtime)


def age(home: Path) -> None:
    before = time.time() - 2 * KEPT_SECONDS
    for file in (home / "blobs").rglob("*"):
        os.utime(file, (before, before))


def test_apply_last_in_anns_folder_is_anns_run(
    nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "ann", tmp_path / "cem"
    mine = a_run_in(here, ANN, "two", tmp_path)
    theirs = a_run_in(there, CEM, "three", tmp_path)
    assert nano("apply", "last", "-C", here)[:2] == (0, "a.py\n")
    assert [(folder / "a.py").read_text() for folder in (here, there)] == ["two\n", "one\n"]
    code, _, err = nano("apply", "last", "-C", there)
    assert (code, f"your newest is {mine.id} in {here}" in err) == (2, True)
    nano("feedback", "last", "--good", "-C", here)
    with LogStore.open(tmp_path / "log.db") as store:
        assert [said.run for said in store.all_feedback()] == [mine.id]
    for command in ("apply", "undo"):
        code, _, err = nano(command, theirs.id)
        assert (code, f"is of {CEM}, who made it in {there}; name a directory with -C" in err) == (2, True)
    assert (there / "a.py").read_text() == "one\n"
    monkeypatch.setattr(changes, "on_terminal", lambda: True)
    for answer, code in (("n\n", 130), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        done = nano("apply", theirs.id)
        assert (done[0], f"of {CEM}" in done[2]) == (code, True)
    assert (there / "a.py").read_text() == "three\n"
    (there / "a.py").write_text("one\n")
    (here / "a.py").write_text("one\n")
    assert nano("apply", theirs.id, "-C", here)[:2] == (0, "a.py\n"), "named, with the directory"
    assert nano("diff", theirs.id)[0] == 0
    assert nano("apply", "last", "-C", there, by=CEM)[:2] == (0, "a.py\n")


def test_the_list_is_of_my_runs_unless_others_are_asked_for(nano: Nano, tmp_path: Path) -> None:
    mine = a_run_in(tmp_path / "ann", ANN, "two", tmp_path)
    theirs = a_run_in(tmp_path / "cem", CEM, "three", tmp_path)
    hidden = a_run_in(tmp_path / "dora", "dora@d", "four", tmp_path, Share.NEVER)

    def listed(*flags: str, by: str = ANN) -> list[str]:
        return [run["id"] for run in json.loads(nano("log", "list", "--json", *flags, by=by)[1])]

    assert listed() == [mine.id]
    assert listed("--by", "all") == [mine.id, theirs.id]
    assert listed("--by", CEM) == [theirs.id]
    assert (listed("--by", "dora@d"), listed(by="dora@d")) == ([], [hidden.id])
    assert CEM in nano("log", "list", "--by", "all")[1]
    assert nano("log", "show", hidden.id)[0] == 2


def test_a_deletion_says_what_goes_and_asks(nano: Nano, tmp_path: Path) -> None:
    runs = [a_run_in(tmp_path / "ann", ANN, word, tmp_path) for word in ("two", "three")]
    theirs = a_run_in(tmp_path / "cem", CEM, "four", tmp_path)
    age(tmp_path)
    for name, ids, count in (("small", [runs[0].id, "x"], 2), ("large", ["y"], 5000), ("other", ["z"], 1)):
        folder = checkpoints_dir() / name
        folder.mkdir(parents=True)
        trained = TrainedOn.of(ids, []).model_copy(update={"runs": count})
        names = dict.fromkeys(("base_model", "profile", "profile_hash", "template_hash", "tools_hash"), "x")
        rest: dict[str, Any] = {"kind": "adapter", "code_version": "1", "created": 0.0, "trained_on": trained}
        write_manifest(folder, Manifest(name=name, **names, **rest))
    code, out, err = nano("log", "delete", runs[0].id)
    assert (code, out) == (2, "")
    assert "would go: 1 runs and 2 files that nothing else needs" in err
    assert "checkpoint small was trained on 1 of them, and stays" in err
    assert "checkpoint large names 1 of the 5000 runs" in err
    assert "checkpoint other" not in err
    assert "nothing was deleted: --yes" in err
    assert nano("log", "show", runs[0].id)[0] == 0
    code, out, _ = nano("log", "delete", "last", runs[0].id, "-C", tmp_path / "ann", "--yes")
    assert (code, out.split(",")[0]) == (0, "deleted: 2 runs and 4 files that nothing else needs")
    assert json.loads(nano("log", "list", "--json", "--by", "all")[1])[0]["id"] == theirs.id
    assert f"is of {CEM}, who alone deletes it" in nano("log", "delete", theirs.id, "--yes")[2]
    assert nano("log", "delete", theirs.id, "--yes", "--json", by=CEM)[0] == 0


def test_pruning_takes_my_old_runs_of_a_project(nano: Nano, tmp_path: Path) -> None:
    old, other, young = (
        a_run_in(tmp_path / name, ANN, "two", tmp_path) for name in ("shop", "other", "shop")
    )
    theirs = a_run_in(tmp_path / "shop", CEM, "two", tmp_path)
    fork = a_run_in(tmp_path / "shop", ANN, "two", tmp_path)
    with LogStore.open(tmp_path / "log.db") as store:
        past = time.time() - 100 * 86_400
        for run in (old, other, theirs, fork):
            _update(store, run.id, started=past)
        _update(store, young.id, parent=fork.id)
    code, out, err = nano("log", "prune", "--older", "90d", "--project", tmp_path / "shop", "--yes")
    assert (code, "deleted: 1 runs" in out) == (0, True)
    assert "1 runs stay: others go on from them" in err
    left = {run["id"] for run in json.loads(nano("log", "list", "--json", "--by", "all")[1])}
    assert left == {other.id, young.id, theirs.id, fork.id}
    assert nano("log", "prune", "--older", "200d", "--yes")[2] == "no run of yours is that old\n"
    assert "--older 'soon' is no time" in nano("log", "prune", "--older", "soon")[2]


def _update(store: LogStore, run: str, **values: Any) -> None:
    from nano_shared.schema import runs

    store.database.write(
        lambda connection: connection.execute(runs.update().where(runs.c.id == run).values(values))
    )


# ------------------------------------------------------------------------------------------ stats


def judged(name: str, policy: str, reward: float | None, **changes: Any) -> Trajectory:
    """A run of an hour with one turn, whose API says what it cost."""
    cost = changes.pop("cost", None)
    usage = Usage(prompt=100, completion=10, cost=cost)
    completion = Completion(
        text="", finish=Finish.STOP, sampling=Sampling(), policy_id=policy,
        api=ApiAnswer(usage=usage) if policy.startswith("openai:") else None,
    )  # fmt: skip
    verdict = None
    if reward is not None:
        verdict = Verdict(reward=reward, trust=Trust.USER_CHECK, grader="g", graded_hash="h")
    turn = Turn(index=0, completion=completion, parser="p", started=0.0, ended=1.0)
    fields: dict[str, Any] = {
        "id": name, "policy": policy, "turns": (turn,), "verdict": verdict, "started": 0.0, "ended": 3600.0,
        "task": Task(key="t", prompt="p"), "stop": StopReason.FINISHED, "owner": ANN, "directory": "/shop",
        **dict.fromkeys(("profile", "profile_hash", "template_hash", "tools_hash", "runtime_version"), "x"),
    }  # fmt: skip
    return Trajectory(**fields | changes)


def test_stats_count_what_was_solved_and_what_it_cost(nano: Nano, tmp_path: Path) -> None:
    week = 7 * 86_400.0
    with LogStore.open(tmp_path / "log.db") as store:
        for run in (
            judged("a", "gguf:a.gguf", 1.0),
            judged("b", "shipped", 0.0),
            judged("c", "openai:big", 1.0, parent="b", cost=0.5),
            judged("d", "shipped", 0.0, directory="/other", started=week, ended=week + 1800),
            judged("e", "openai:big", 0.0, parent="d", cost=0.25, started=week, ended=week),
            judged("f", "openai:big", 1.0, cost=2.0),
            judged("g", "shipped", None),
            judged("h", "shipped", 1.0, owner=CEM),
        ):
            store.append(run)
    (code, out, err), every = nano("log", "stats"), json.loads(nano("log", "stats", "--json")[1])
    assert (code, err) == (0, "")
    assert out.split()[-9:] == ["7", "1", "1", "1", "3", "2.75", "0.38", "330", "5.5"]
    assert every == {
        "name": "all", "runs": 7, "solved_locally": 1, "solved_by_escalation": 1, "solved_hosted": 1,
        "failed": 3, "dollars": 2.75, "dollars_not_spent": 0.375, "tokens": 330, "hours": 5.5,
    }  # fmt: skip

    def by(what: str) -> dict[str, tuple[int, int]]:
        rows = json.loads(nano("log", "stats", "--by", what, "--json")[1])
        return {row["name"]: (row["runs"], row["solved_locally"]) for row in rows}

    assert by("model") == {"gguf:a.gguf": (1, 1), "shipped": (3, 0), "openai:big": (3, 0)}
    assert by("project") == {"/shop": (6, 1), "/other": (1, 0)}
    assert list(by("week").values()) == [(5, 1), (2, 0)]
    assert by("owner") == {ANN: (7, 1), CEM: (1, 1)}
    assert json.loads(nano("log", "stats", "--json", by=CEM)[1])["dollars_not_spent"] is None
    assert "unknown" in nano("log", "stats", by=CEM)[1]
