"""Composed verdicts: chosen in words, logged apart, gated by the outcome, and never an invented number."""

from __future__ import annotations

from pathlib import Path

import pytest
from rewarded import ADD, FAIL, MEND, READ, SOLVE, SUBMIT, new_runtime, opened, rolled
from typer.testing import CliRunner

from nano_coder.run.execution import Runtime
from nano_preferences.registry import open_reward, parse_reward
from nano_rl.checkpoints.evaluate import component_means, table
from nano_rl.cli import cli
from nano_rl.config import RewardConfig
from nano_rl.tasks.task_file import write_tasks
from nano_shared.errors import NanoError, UsageError
from nano_shared.store import LogStore
from nano_shared.types import OracleAction, StopReason, Tampering, Task, Trajectory, outcome


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return new_runtime(tmp_path_factory.mktemp("composed"))


@pytest.fixture(scope="module")
def runs(runtime: Runtime) -> list[Trajectory]:
    return rolled(runtime, SOLVE, (READ, READ, MEND, SUBMIT), FAIL)


def test_the_composed_verdict_stands_beside_the_graders_and_says_what_it_is_made_of(
    runtime: Runtime, runs: list[Trajectory]
) -> None:
    reward = open_reward(parse_reward("tests=1,process=0.2,safety=0.1"))
    first, second, failed = reward.apply(runs, runtime)
    assert first.reward == pytest.approx(1.0)
    assert second.reward == pytest.approx((1 + 0.2 * 0.75 + 0.1) / 1.3)
    assert failed.reward == 0.0
    for run, base in ((first, runs[0]), (failed, runs[2])):
        logged = runtime.store.verdicts(run.id)
        assert base.verdict is not None
        assert run.verdict is not None
        assert logged[-1] == run.verdict == runtime.store.get(run.id).verdict
        assert base.verdict in logged
        assert run.verdict.grader.startswith(f"{base.verdict.grader} + nano-reward 1 tests=1,process=0.2,")
        assert run.verdict.components["tests"] == base.reward == outcome(run.verdict)
        assert set(run.verdict.components) >= {"tests", "process", "safety"}
        assert (run.verdict.checks, run.verdict.trust) == (base.verdict.checks, base.verdict.trust)
    # the failure's shaping is logged, and counts nothing
    assert failed.verdict is not None
    assert failed.verdict.components["process"] == 1.0
    assert table([first, second, failed])[0].successes == 2
    assert component_means([first, failed])["tests"] == 0.5


def test_another_recipe_is_composed_of_the_outcome_and_not_of_the_last_reward(
    runtime: Runtime, runs: list[Trajectory]
) -> None:
    once = opened(tests=1, process=1).apply(runs, runtime)
    twice = opened(tests=1, format=1).apply(once, runtime)
    assert [r.reward for r in twice] == [1.0, 1.0, 0.0]
    assert twice[0].verdict is not None
    assert twice[0].verdict.grader.count("nano-reward") == 1


def test_tampering_earns_nothing_whatever_the_parts_say(runtime: Runtime, runs: list[Trajectory]) -> None:
    base = runs[0].verdict
    assert base is not None
    found = (Tampering(kind="exit", detail="left early"),)
    hacked = runs[0].model_copy(update={"verdict": base.model_copy(update={"tampering": found})})
    (run,) = opened(tests=1, process=5, format=5).apply([hacked], runtime)
    assert run.verdict is not None
    assert (run.reward, run.verdict.tampering, run.verdict.components["tests"]) == (0.0, found, 0.0)


@pytest.mark.parametrize("stop", [StopReason.SANDBOX_ERROR, StopReason.POLICY_ERROR, None])
def test_a_failure_of_ours_has_no_reward_whatever_the_parts_say(
    stop: StopReason | None, runtime: Runtime, runs: list[Trajectory]
) -> None:
    ours = runs[0].model_copy(update={"stop": stop})
    (run,) = opened(tests=1, process=1).apply([ours], runtime)
    assert run.reward is None


def test_what_was_not_graded_is_not_composed(runtime: Runtime) -> None:
    task = ADD.model_copy(update={"key": "open", "hidden": None, "check": None})
    (run,) = opened(tests=1, process=1).apply(rolled(runtime, SOLVE, task=task), runtime)
    assert run.verdict is None


def test_the_fraction_of_checks_counts_on_request_and_its_steps_bound_the_tie_break(runtime: Runtime) -> None:
    half = "@write_file path=sums.py\ndef add(a, b):\n    return a + abs(b) if a > 0 else 0\n"
    runs = rolled(runtime, (READ, half, SUBMIT), FAIL, (half, half, half, SUBMIT), SOLVE)
    parts = {"tests": {"weight": 1, "fraction": True}, "process": {"weight": 3}}
    config = RewardConfig(parts=parts, tie_break=0.9)
    done = open_reward(config).apply(runs, runtime)
    partly, failed, wasteful, right = (run.reward or 0.0 for run in done)
    assert 0 < failed < wasteful < partly < right
    assert partly == pytest.approx((2 / 3 + 0.9 / 3) / 4)


USER = '''
import math

def trl(prompts, completions, completion_ids, **columns):
    assert len(prompts) == len(completions) == len(columns["tests"]) == len(completion_ids)
    return [1.0 if "a + b" in text else 0.25 for text in completions]

async def later(prompts, completions, **columns):
    return [0.5 for _ in prompts]

def chat(prompts, completions):
    roles = [(p[0]["role"], c[0]["role"]) for p, c in zip(prompts, completions)]
    return [float(pair == ("user", "assistant")) for pair in roles]

def by_run(trajectories):
    return [None if t.answer is None else 1.0 for t in trajectories]

def scaled(prompts, completions):
    return [-1 for _ in prompts]

def nan(prompts, completions):
    return [math.nan for _ in prompts]

def infinite(prompts, completions):
    return [math.inf for _ in prompts]

def beyond(prompts, completions):
    return [1.5 for _ in prompts]

def short(prompts, completions):
    return [1.0]

def number(prompts, completions):
    return 1.0

def words(prompts, completions):
    return ["good" for _ in prompts]

def wants(prompts, solution):
    return []
'''  # fmt: skip


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        ("trl", {}, [1.0, 1.0]),
        ("later", {}, [0.5, 0.5]),
        ("chat", {"messages": True}, [1.0, 1.0]),
        ("by_run", {}, [None, None]),
        ("scaled", {"low": -2, "high": 2}, [0.25, 0.25]),
    ],
)
def test_a_function_in_trls_form_or_by_named_columns_is_taken_as_it_is(
    function: str, settings: dict[str, object], expected: list[float | None], user: str, runtime: Runtime,
    runs: list[Trajectory],
) -> None:  # fmt: skip
    name = f"{user}:{function}"
    done = opened(tests=1, **{name: {"weight": 0.5, **settings}}).apply(runs[:2], runtime)
    assert [run.verdict.components[name] for run in done if run.verdict] == expected


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("nan", "gave nan to run"),
        ("infinite", "gave inf to run"),
        ("beyond", "gave 1.5 to run"),
        ("short", "returned 1 values for 2 completions"),
        ("number", "returned float for 2 completions"),
        ("words", "gave 'good' to run"),
    ],
)
def test_what_is_no_list_of_scores_is_an_error_and_nothing_is_logged(
    function: str, sentence: str, user: str, runtime: Runtime, runs: list[Trajectory]
) -> None:
    before = runtime.store.verdicts(runs[0].id)
    with pytest.raises(UsageError, match=sentence):
        opened(tests=1, **{f"{user}:{function}": 0.5}).apply(runs[:2], runtime)
    assert runtime.store.verdicts(runs[0].id) == before


def test_functions_that_cannot_be_called_are_refused_before_anything_runs(user: str) -> None:
    for name, sentence in (
        (f"{user}:absent", "defines no 'absent'; what fits there is trl, later, chat, by_run"),
        ("no_such_module_here:f", "unknown reward part 'no_such_module_here:f'"),
    ):
        with pytest.raises(NanoError, match=sentence):
            opened(tests=1, **{name: 0.5})
    with pytest.raises(
        NanoError, match=r"wants 'solution', which task '.*' has no column of; columns: compl"
    ):
        opened(tests=1, **{f"{user}:wants": 0.5}).probe([ADD])


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("process=1", "add tests=1"),
        ("tests=0,process=1", "give tests a weight above 0"),
        ("tests=1,nope=1", "unknown reward part 'nope'; parts: constitution, diff_size"),
        ("tests=-1", "greater than or equal to 0"),
        ("tests=nan", "finite number"),
        ("tests=1,tests=2", "names tests twice"),
        ("tests", "is no part=weight"),
        ("", "is no part=weight"),
        ("tests:x=1", "takes no argument"),
        ("nowhere.toml", "no such file: nowhere.toml"),
    ],
)
def test_bad_words_are_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(NanoError) as error:
        open_reward(parse_reward(text))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_settings(tmp_path: Path) -> None:
    file = tmp_path / "reward.toml"
    file.write_text("tie_break = 0.5\n[parts]\ntests = 1\nlength = { weight = 0.2, at_most = 100 }\n")
    config = parse_reward(str(file))
    assert (config.tie_break, config.parts["length"]["at_most"]) == (0.5, 100)
    assert open_reward(config).gate.weights["tests"] == pytest.approx(1 / 1.2)
    file.write_text("[parts]\ntests = 1\nlength = { weight = 0.2, at_mots = 100 }\n")
    with pytest.raises(NanoError, match="reward part length: at_mots: no such setting"):
        open_reward(parse_reward(str(file)))


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    oracle = (
        OracleAction(name="read_file", arguments={"path": "sums.py"}),
        OracleAction(name="edit_file", arguments={"path": "sums.py", "line": 2, "new": "    return a + b"}),
        OracleAction(name="submit"),
    )
    task = Task.model_validate({**ADD.model_dump(), "oracle": oracle})
    write_tasks(tmp_path / "tasks.jsonl", [task])
    return tmp_path / "tasks.jsonl"


def test_the_command_line_chooses_the_reward(task_file: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    command = ["rollout", "--oracle", "--tasks", str(task_file), "--log", log]
    result = CliRunner().invoke(cli, [*command, "--reward", "tests=1,process=0.5"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "process" in result.stdout
    (run,) = LogStore.open(log).trajectories()
    assert run.verdict is not None
    assert run.verdict.components["process"] == 1.0
    with pytest.raises(NanoError, match="unknown reward part"):
        CliRunner().invoke(cli, [*command, "--reward", "tests=1,style=1"], catch_exceptions=False)
