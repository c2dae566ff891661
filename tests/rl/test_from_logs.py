"""`nano-rl train --from-logs` as a user calls it: real runs of a real tiny model, in several logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from looping import TASKS, runtime_at, tiny_model
from typer.testing import CliRunner

from nano_coder.cli import cli as coder
from nano_coder.models.opening import local_policy, open_weights
from nano_rl.cli import cli
from nano_rl.gather.rollouts import collect
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.training_record import USED, read_used
from nano_shared.checkpoint import read_checkpoint
from nano_shared.errors import CheckpointError, GuardTripped, UsageError
from nano_shared.store import LogStore
from nano_shared.types import Trust, Verdict

SETTINGS = ("--prompts", "2", "--set", "guards.patience=99", "--learning-rate", "0.001")
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for the prompts of ad-hoc runs."""
    return tiny_model(tmp_path_factory.mktemp("roomy"), max_positions=2048)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    monkeypatch.delenv("NANO_LOG", raising=False)
    return tmp_path


@pytest.fixture
def train(home: Path, tiny: Path) -> Train:
    def go(*arguments: str, name: str = "mine", model: Path | str = tiny) -> dict[str, Any]:
        alone = () if "--fresh" in arguments else ("--fresh", "0")
        command = ["train", "--name", name, "--model", str(model), "--from-logs", "--json", *SETTINGS, *alone]
        done = CliRunner().invoke(cli, [*command, *arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    return go


def logged(model: Path, log: Path, *, tasks: slice = slice(3), size: int = 4, seed: int = 5) -> list[str]:
    """Runs of the model on some tasks, every other one of which passed."""
    opened = open_weights(str(model))
    policy = local_policy(opened.loaded, opened.profile, version=opened.version)
    runtime = runtime_at(log)
    with runtime.store:
        live = runtime.__class__(
            policy=policy, sandbox=runtime.sandbox, store=runtime.store, sampling=runtime.sampling
        )
        runs = collect(TASKS[tasks], live, group_size=size, seed=seed)
        for place, run in enumerate(runs):
            verdict = Verdict(
                reward=float(place % 2), trust=Trust.HIDDEN, grader="test-1", graded_hash="",
                components={"tests": float(place % 2)},
            )  # fmt: skip
            runtime.store.add_verdict(run.id, verdict)
    return [run.id for run in runs]


def runs_in(log: Path) -> set[str]:
    with LogStore.open(log, create=False) as store:
        return {run.id for run in store.trajectories()}


@pytest.mark.slow
def test_several_logs_are_read_together_and_filled_with_fresh_rollouts(
    home: Path, tiny: Path, train: Train
) -> None:
    mine, team = home / "mine.db", home / "team.db"
    ids = {*logged(tiny, mine, size=1), *logged(tiny, team, size=2, seed=6)}
    told = train("--log", str(mine), "--log", str(team), "--fresh", "6", "--steps", "1")
    (row,) = read_metrics(home / "trainings" / "mine" / METRICS)
    # two groups of six, three of each group logged: one in the first log, two in the second
    assert (row["rollouts"], row["logged_runs"], row["fresh_runs"], row["log_share"]) == (12, 6, 6, 0.5)
    assert row["log_left"] == 3
    assert told["learned_from"]["logged_runs"] == 6
    (line,) = read_used(home / "trainings" / "mine" / USED)
    used = {run for group in line["groups"] for run in group["runs"]}
    assert len(used & ids) == 6
    # fresh rollouts are written to the first log and to that alone
    assert used - ids <= runs_in(mine)
    assert len(used - ids) == 6
    assert runs_in(team) <= ids


def test_each_run_is_learned_from_once_and_a_training_of_logs_ends_with_them(
    home: Path, tiny: Path, train: Train
) -> None:
    log = home / "a.db"
    ids = logged(tiny, log)
    told = train("--log", str(log), "--steps", "9")
    assert told["steps"] == 2  # three groups, two a step
    assert read_checkpoint(home / "checkpoints" / "mine").policy_version == 2
    steps = read_used(home / "trainings" / "mine" / USED)
    assert sorted(r for line in steps for g in line["groups"] for r in g["runs"]) == sorted(ids)

    with pytest.raises(UsageError, match="12 this policy has learned from it already"):
        train("--log", str(log), name="next", model="mine")
    again = train("--log", str(log), "--set", "logs.uses=2", name="next", model="mine")
    assert again["learned_from"]["logged_runs"] == 12
    # they were sampled before two updates, and the second step is an update later
    assert [row["age_max"] for row in read_metrics(home / "trainings" / "next" / METRICS)] == [2, 3]


@pytest.mark.slow
def test_fresh_rollouts_go_on_where_the_logs_end(home: Path, tiny: Path, train: Train) -> None:
    log = home / "a.db"
    logged(tiny, log, size=2)
    train("--log", str(log), "--fresh", "4", "--steps", "3")
    rows = read_metrics(home / "trainings" / "mine" / METRICS)
    assert [row["logged_runs"] for row in rows] == [4, 2, 0]
    assert [row["fresh_runs"] for row in rows] == [4, 6, 8]
    assert [row["log_left"] for row in rows] == [2, 0, 0]


@pytest.mark.slow
def test_age_counts_updates_along_the_checkpoints_and_bounds_what_is_read(
    home: Path, tiny: Path, train: Train
) -> None:
    old, young = home / "old.db", home / "young.db"
    logged(tiny, old)
    train("--log", str(old), "--steps", "2")
    unused, later = home / "unused.db", home / "checkpoints" / "mine"
    logged(tiny, unused, seed=7)
    logged(later, young, seed=8)
    logs = ("--log", str(unused), "--log", str(young))
    with pytest.raises(UsageError, match="12 more than 1 updates old"):
        train("--log", str(unused), "--set", "objective.max_staleness=1", name="b", model="mine")
    train(*logs, "--set", "objective.max_staleness=2", "--steps", "1", "--fresh", "0", name="b", model="mine")
    (row,) = read_metrics(home / "trainings" / "b" / METRICS)
    # groups hold runs of both policies, and at the second step those of the first would be too old
    assert (row["age_max"], row["logged_runs"]) == (2, 16)
    train(*logs, "--set", "objective.max_staleness=2", "--steps", "2", name="c", model="mine")
    rows = read_metrics(home / "trainings" / "c" / METRICS)
    assert [row["too_old"] for row in rows] == [0, 4]
    assert rows[1]["age_max"] == 1


def test_runs_of_a_policy_that_is_no_ancestor_have_no_age(home: Path, tiny: Path, train: Train) -> None:
    stranger, log = tiny_model(home / "stranger", seed=3), home / "a.db"
    logged(stranger, log)
    with pytest.raises(UsageError, match="12 age unknown: sampled by a policy that this one does not come"):
        train("--log", str(log))


@pytest.mark.slow
def test_a_training_goes_on_with_the_logs_it_began_with(
    home: Path, tiny: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_rl.gather.step_groups.LARGEST_GROUP", 4)
    one, two = home / "one.db", home / "two.db"
    logged(tiny, one)
    logged(tiny, two, seed=6)
    train("--log", str(one), "--log", str(two), "--steps", "1")
    (home / "checkpoints" / "mine").rename(home / "first")
    logged(tiny, two, seed=9)  # the log grows, and what was begun keeps to what it began with
    command = ["train", "--name", "mine", "--resume", "--json", "--steps", "2"]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    left = [row["log_left"] for row in read_metrics(home / "trainings" / "mine" / METRICS)]
    assert left == [16, 8]
    (home / "checkpoints" / "mine").rename(home / "second")
    with pytest.raises(CheckpointError, match="of which the log admits 12 no longer"):
        train("--log", str(one), "--steps", "3", "--resume")


def test_logs_that_hold_nothing_for_this_policy_say_what_they_hold(
    home: Path, tiny: Path, train: Train
) -> None:
    log = home / "a.db"
    LogStore.open(log).close()
    with pytest.raises(UsageError, match=r"a\.db holds no runs; nano-coder run or nano-rl rollout adds some"):
        train("--log", str(log))
    logged(tiny, log, size=1)
    with pytest.raises(UsageError, match=r"none of the 3 runs .* \(3 lone in its group\); nano-rl admit"):
        train("--log", str(log))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from-logs", "--log", "nowhere.db"], "--log nowhere.db: there is no such log"),
        (["--from-logs", "--log", "a.db", "--log", "a.db"], "--log a.db is given twice"),
        (
            ["--from-logs", "--fresh", "0", "--set", "logs.mutants=3"],
            "logs.mutants acts beside fresh",
        ),
        (["--from-logs", "--group-size", "4"], "--group-size is --fresh with --from-logs"),
        (["--from-logs", "--fresh", "1"], "a group of 1 has nothing to be compared with"),
        (["--tasks", "x", "--fresh", "4"], "--fresh adds rollouts to logged groups"),
        (["--tasks", "x", "--set", "logs.uses=2"], "logs.uses is read with --from-logs alone"),
        (
            ["--tasks", "x", "--set", "logs.lambda_preference=1"],
            "logs.lambda_preference is read with --from-logs alone",
        ),
        (["--tasks", "x", "--log", "a.db", "--log", "b.db"], "several --log are read together with"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    home: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    for name in ("a.db", "b.db"):
        LogStore.open(home / name).close()
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(cli, ["train", "--name", "other", *arguments], catch_exceptions=False)


SOMETIMES = "test $(od -An -N1 -tu1 /dev/urandom) -lt 128"
"""a check that half of all runs pass, whatever they do"""


def greedy_runs(
    home: Path, model: Path, checks: list[str | None], log: str = "log.db", temperature: str = "0"
) -> None:
    """One `nano-coder run` of each check in a project of one's own."""
    project = home / "project"
    project.mkdir(exist_ok=True)
    (project / "a.py").write_text("x = 1\n")
    for number, check in enumerate(checks):
        command = ["run", f"mend {number}", "-C", str(project), "--model", str(model), "--json"]
        command += ["--limit", "max_turns=2", "--limit", "max_completion_tokens=32"]
        command += [
            "--temperature",
            temperature,
            "--log",
            str(home / log),
            *(["--check", check] if check else []),
        ]
        done = CliRunner().invoke(coder, command, catch_exceptions=False)
        assert done.exit_code in (0, 1), done.output


@pytest.mark.slow
def test_greedy_runs_are_environments_that_fresh_rollouts_train_on(home: Path, roomy: Path) -> None:
    greedy_runs(home, roomy, [SOMETIMES, SOMETIMES, None, "no-such-program"])
    command = ["train", "--name", "mine", "--model", str(roomy), "--from-logs", "--steps", "1"]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    # the run without a check and the one whose check names no program can never earn anything
    assert "environments: 2 logged tasks; at most 16 fresh rollouts" in done.stderr
    assert "refused: 4 runs (greedy)" in done.stderr
    (row,) = read_metrics(home / "trainings" / "mine" / METRICS)
    assert (row["fresh_runs"], row["logged_runs"], row["tasks"]) == (16, 0, 2)
    assert row["grad_norm"] > 0


@pytest.mark.slow
def test_ordinary_runs_train_at_whatever_temperature_they_were_sampled(home: Path, roomy: Path) -> None:
    """Their log-probs are those of that temperature, and the trainer's of their rows are too."""
    greedy_runs(home, roomy, [SOMETIMES, SOMETIMES], temperature="0.6")
    command = ["train", "--name", "mine", "--model", str(roomy), "--from-logs", "--steps", "1"]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "admitted: 2 runs of 2 tasks" in done.stderr
    (row,) = read_metrics(home / "trainings" / "mine" / METRICS)
    assert (row["logged_runs"], row["fresh_runs"]) == (2, 14)
    assert row["mismatch_max"] < 1e-4


@pytest.mark.slow
def test_what_cannot_be_learned_from_ends_with_a_sentence(home: Path, roomy: Path, train: Train) -> None:
    greedy_runs(home, roomy, ["false", "true", "false"])
    with pytest.raises(GuardTripped, match="from the 3 logged tasks: 1 are solved in all of 2 rollouts"):
        train("--steps", "9", "--fresh", "2", "--prompts", "3", model=roomy)
    greedy_runs(home, roomy, [None], log="unchecked.db")
    with pytest.raises(UsageError, match="give nano-coder run a --check"):
        train("--fresh", "2", "--log", str(home / "unchecked.db"), name="other", model=roomy)


@pytest.mark.slow
def test_a_task_without_a_signal_rests_and_a_training_ends_when_none_has_one(
    home: Path, roomy: Path, train: Train
) -> None:
    """One task tells its rollouts apart for as long as the run lasts, the other never does."""
    greedy_runs(home, roomy, ["false", SOMETIMES])
    # of 16 all pass or all fail once in 32,768 times
    train("--steps", "5", "--fresh", "16", model=roomy)
    rows = read_metrics(home / "trainings" / "mine" / METRICS)
    assert [row["groups"] for row in rows] == [2, 1, 2, 1, 1]
    assert [row["tasks_resting"] for row in rows] == [0, 1, 0, 1, 1]


@pytest.mark.slow
def test_a_training_of_environments_goes_on_with_those_it_began_with(
    home: Path, roomy: Path, train: Train
) -> None:
    greedy_runs(home, roomy, [SOMETIMES, SOMETIMES])
    train("--steps", "1", "--fresh", "8", model=roomy)
    (home / "checkpoints" / "mine").rename(home / "first")
    train("--steps", "2", "--fresh", "8", "--resume", model=roomy)  # by now its own rollouts are in the log
    rows = read_metrics(home / "trainings" / "mine" / METRICS)
    assert [row["fresh_runs"] for row in rows] == [16, 16]


@pytest.mark.slow
def test_the_files_of_a_task_come_along_from_another_log(home: Path, roomy: Path, train: Train) -> None:
    greedy_runs(home, roomy, [SOMETIMES], log="team/log.db")
    mine = home / "mine" / "log.db"
    mine.parent.mkdir()
    LogStore.open(mine).close()
    train(
        "--log",
        str(mine),
        "--log",
        str(home / "team" / "log.db"),
        "--steps",
        "1",
        "--fresh",
        "8",
        model=roomy,
    )
    assert len(runs_in(mine)) == 8


def test_the_environment_names_one_log_whatever_is_in_its_name(
    home: Path, tiny: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = home / "a log.db"
    logged(tiny, log)
    monkeypatch.setenv("NANO_LOG", str(log))
    assert train("--steps", "1")["learned_from"]["logged_runs"] == 8
