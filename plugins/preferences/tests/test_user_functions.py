"""Functions of users in rewards, environments, objectives and suites: checked before any work, and named."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rewarded import ADD, new_runtime, rolled
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "coder"))

from executions import a_runtime

from integration.tiny_model import build_tiny
from nano_coder.environment import Environments, open_environment
from nano_preferences.registry import data_columns, open_reward, parse_reward
from nano_rl.cli import cli
from nano_rl.gather.rollouts import collect
from nano_rl.learn.groups import form_groups, group_metrics
from nano_rl.learn.loss import probe_objective
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.tasks.task_file import read_tasks, write_tasks
from nano_shared import extension_points
from nano_shared.errors import ConfigError, NanoError, UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.types import Split, StopReason, Task, Trajectory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user as the current one, in a process that has imported no file of users."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(extension_points, "_sources", {})
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    for module in ("mine", "env", "suite"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def invoke(*arguments: str, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


# ------------------------------------------------------------------------------------------ rewards

REWARDS = """
import asyncio, time
import numpy as np
import torch

gate = asyncio.Semaphore(1)

def gsm(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

def ground(completions, ground_truth, submitted):
    return [float(s == g) for s, g in zip(submitted, ground_truth)]

def everything(completions, **columns):
    assert len(set(map(len, columns.values()))) == 1
    return [float(columns["solution"][0] == {"steps": [1]}) for _ in completions]

def tensor(completions, **kw): return torch.tensor([0.5 for _ in completions], requires_grad=True)
def array(completions, **kw): return np.array([[1] for _ in completions], dtype=np.float16)

async def guarded():
    async with gate:
        await asyncio.sleep(0.001)
        return 1.0

async def later(completions, **kw): return await asyncio.gather(*[guarded() for _ in completions])

def fails(completions, **kw): raise ValueError("my reward broke")
def misspelt(completions, **kw): return [lenght(c) for c in completions]
def text(completions, **kw): return ["0.5" for _ in completions]
def beyond(completions, **kw): return [-1 for _ in completions]
def scalar(completions, **kw): return 1.0
def short(completions, **kw): return [1.0]
def leaves(completions, **kw): raise SystemExit(3)
def lazy(completions, **kw): return (1 / 0 for c in completions)
def unknown(completions, reference): return [1.0 for _ in completions]
def spread(completions, **kw): return [0.5 / (len(set(completions)) - 1) for _ in completions]

calls = 0

def hangs(completions, **kw):
    global calls
    calls += 1
    if calls > 1:
        time.sleep(60)
    return [1.0 for _ in completions]
"""
ROWS = [
    {"prompt": "2 + 2?", "answer": "4", "ground_truth": "4", "solution": {"steps": [1]}},
    {"prompt": [{"role": "user", "content": "2 + 3?"}], "answer": "5", "ground_truth": "5", "solution": None},
]


@pytest.fixture
def imported(here: Path) -> list[Task]:
    """Rows of TRL as `tasks import` leaves them."""
    (here / "mine.py").write_text(REWARDS)
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    invoke("tasks", "import", "rows.jsonl")
    return read_tasks(here / "rows.jsonl.tasks.jsonl")


def test_a_function_of_trl_reads_the_columns_of_the_data_set(here: Path, imported: list[Task]) -> None:
    runtime = new_runtime(here)
    right, wrong = rolled(runtime, ("@submit\n4",), ("@submit\n3",), task=imported[0])
    for name, values in (("gsm", [1, 0]), ("ground", [1, 0]), ("everything", [1, 1]), ("later", [1, 1])):
        for reference in (f"./mine.py:{name}", f"mine:{name}"):
            reward = open_reward(parse_reward(f"{reference}=1")).probe(imported)
            assert [run.reward for run in reward.apply([right, wrong], runtime)] == values


def test_columns_are_those_of_the_row_of_the_check_and_of_the_task_itself() -> None:
    plain = Task(key="a", prompt="?", hidden=AnswerChecks(answer=7))
    assert data_columns(plain) == {"answer": 7}
    assert data_columns(plain.model_copy(update={"columns": {"answer": 8, "tests": 1, "level": "hard"}})) == {
        "answer": 8, "level": "hard",
    }  # fmt: skip
    assert "columns" not in plain.model_dump()  # ids of older tasks stay
    assert plain.id == content_hash(plain.model_dump(mode="json") | {"hidden": plain.hidden.full_dump()})  # type: ignore[union-attr]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", r"raised ValueError: my reward broke \(mine\.py, line \d+\)"),
        ("misspelt", r"raised NameError: .*'lenght' is not defined.* \(mine\.py, line \d+\)"),
        ("text", "gave '0.5' to a made-up completion, before the first rollout"),
        ("beyond", r"gave -1\.0 to a made-up completion.*between 0 and 1 \(low and high can be set"),
        ("lazy", r"raised ZeroDivisionError: .*mine\.py, line"),
        ("scalar", "returned float for 2 completions"),
        ("short", "returned 1 values for 2 completions"),
        ("leaves", "raised SystemExit: 3"),
        (
            "unknown",
            "wants 'reference', which task '.*' has no column of; columns: answer, completion_ids",
        ),
        ("everythin", "defines no 'everythin'; what fits there is everything, gsm"),
    ],
)
def test_what_cannot_score_is_refused_before_the_first_rollout(
    name: str, said: str, imported: list[Task]
) -> None:
    with pytest.raises(NanoError, match=said) as refused:
        open_reward(parse_reward(f"./mine.py:{name}=1")).probe(imported)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["tensor", "array", "later", "spread"])
def test_numbers_of_any_library_and_functions_that_compare_pass(name: str, imported: list[Task]) -> None:
    open_reward(parse_reward(f"./mine.py:{name}=1")).probe(imported)


def test_a_deadline_leaves_rollouts_without_a_score(
    here: Path, imported: list[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "reward.toml").write_text('[parts."./mine.py:hangs"]\nweight = 1\ndeadline = 0.2\n')
    runtime = new_runtime(here)
    (run,) = rolled(runtime, ("@submit\n4",), task=imported[0])
    (judged,) = open_reward(parse_reward("reward.toml")).probe(imported).apply([run], runtime)
    assert judged.verdict is not None
    assert (judged.reward, judged.verdict.failure_kind) == (None, "function_late")
    assert "./mine.py:hangs took longer than its deadline of 0.2 s" in capsys.readouterr().err


def test_the_grader_of_a_run_says_which_code_rewarded_it(here: Path) -> None:
    recipes = []
    for folder, value in (("a", 1), ("b", 0), ("c", 0)):
        (here / folder).mkdir()
        (here / folder / "mine.py").write_text(f"def f(completions): return [{value} for c in completions]")
        (here / "mine.py").unlink(missing_ok=True)
        (here / "mine.py").symlink_to(here / folder / "mine.py")
        recipes.append(open_reward(parse_reward("./mine.py:f=1")).recipe)
    assert recipes[0] != recipes[1] == recipes[2]


# -------------------------------------------------------------------------------------- environments

ENVIRONMENT = '''
from decimal import Decimal
import numpy as np
import torch
from nano_coder.environment import EnvironmentSession

print("IMPORTED")
GIVEN = {"numpy": np.float32(0.5), "bool": np.bool_(True), "torch": torch.tensor(0.5),
         "decimal": Decimal("0.5"), "text": "0.5", "nan": np.float64("nan")}

class Session(EnvironmentSession):
    def __init__(self, row): self.row = row
    def grade(self, run):
        print("GRADED")
        self.components = {"length": np.int64(len(run.answer))}
        return GIVEN[self.row["how"]] if "how" in self.row else np.float32(0.5 + 0.3 * (len(run.answer) % 2))

class Words:
    """Texts of one answer: no tool, no submit."""
    def tasks(self, split, seed):
        return [{"prompt": f"Say {n}", "key": np.int64(n), "answer": np.float32(n)} for n in range(2)]
    def start(self, row, limits): return Session(row)

class Numbers(Words):
    def tasks(self, split, seed): return [{"prompt": "?", "key": how, "how": how} for how in GIVEN]

class Hidden:
    def tasks(self, split, seed): raise KeyError("rows")
    def start(self, row, limits): ...
'''


def answered(folder: Path, env: str, key: str, texts: list[str]) -> Trajectory:
    environments = Environments.open([env])
    (task,) = [task for task in environments.tasks(Split.TRAIN, 0) if task.key.endswith(f":{key}")]
    (run,) = collect([task], replace(a_runtime(folder, texts), environments=environments))
    return run


def test_a_text_that_ended_is_an_answer_and_the_prompt_offers_no_tool(here: Path) -> None:
    (here / "env.py").write_text(ENVIRONMENT)
    assert answered(here, "env:Words", "1", ["a"]).stop is StopReason.FINISHED
    run = answered(here, "./env.py:Words max_turns=1", "1", ["a @submit as text"])
    assert (run.stop, run.answer, run.task.tools) == (StopReason.FINISHED, "a @submit as text", ())
    assert run.reward == pytest.approx(0.8)
    assert run.turns[0].calls == run.turns[0].observations == ()
    assert run.verdict is not None
    assert run.verdict.components["length"] == 17
    assert group_metrics(form_groups([run]))["frac_truncated"] == 0
    assert run.verdict.grader.startswith("environment env.py:Words [")


@pytest.mark.parametrize(
    ("how", "reward"),
    [("numpy", 0.5), ("bool", 1.0), ("torch", 0.5), ("decimal", 0.5), ("text", None), ("nan", None)],
)
def test_an_environment_may_give_a_number_of_any_library(how: str, reward: float | None, here: Path) -> None:
    (here / "env.py").write_text(ENVIRONMENT)
    run = answered(here, "./env.py:Numbers", how, ["x"])
    assert run.reward == reward
    assert run.verdict is not None
    if reward is None:
        assert "env.py:Numbers: grade gave no reward but" in str(run.verdict.failure_kind) + str(run.verdict)


def test_what_opens_no_environment_is_refused_with_those_that_do(here: Path) -> None:
    (here / "env.py").write_text(ENVIRONMENT)
    with pytest.raises(ConfigError, match=r"defines no 'Wrds'; what fits there is Words, Numbers, Hidden$"):
        open_environment("./env.py:Wrds")
    with pytest.raises(ConfigError, match="is the class Session, which has no method tasks"):
        open_environment("./env.py:Session")
    with pytest.raises(NanoError, match=r"Hidden.* raised KeyError: 'rows' \(env\.py, line \d+\)"):
        open_environment("./env.py:Hidden").tasks(Split.TRAIN, 0)


# ------------------------------------------------------------------------------ objectives, a training

OBJECTIVES = """
from nano_rl.learn.objectives import Objective

def half(new_N, ratio_N, advantages_N, config): return -0.5 * ratio_N * advantages_N
def raises(new_N, ratio_N, advantages_N, config):
    return new_N.nope
def number(new_N, ratio_N, advantages_N, config): return 0.5
def one(new_N, ratio_N, advantages_N, config): return (ratio_N * advantages_N).mean()
def flat(new_N, ratio_N, advantages_N, config): return ratio_N.detach() * advantages_N
def endless(new_N, ratio_N, advantages_N, config): return (ratio_N - 1).log()

HALF, RAISES, NUMBER = Objective(surrogate=half), Objective(surrogate=raises), Objective(surrogate=number)
ONE, FLAT, ENDLESS = Objective(surrogate=one), Objective(surrogate=flat), Objective(surrogate=endless)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("RAISES", r"raised AttributeError: .* \(objective\.py, line 6\)$"),
        ("NUMBER", "returned float for 3 tokens; it must return a tensor"),
        ("ONE", r"returned a tensor \[\] for 3 tokens"),
        ("FLAT", "returned a loss without a gradient"),
        ("ENDLESS", "all must be finite"),
    ],
)
def test_an_objective_that_gives_no_loss_is_refused_before_a_model_is_loaded(
    name: str, said: str, here: Path
) -> None:
    (here / "objective.py").write_text(OBJECTIVES)
    with pytest.raises(UsageError, match=said):
        probe_objective(ObjectiveConfig(objective=f"./objective.py:{name}").terms)
    probe_objective(ObjectiveConfig(objective="./objective.py:HALF").terms)


@pytest.mark.slow
def test_an_environment_of_texts_trains_and_edited_code_is_named(here: Path) -> None:
    torch.set_num_threads(1)
    (here / "env.py").write_text(ENVIRONMENT)
    (here / "objective.py").write_text(OBJECTIVES)
    build_tiny(here / "tiny", ["Say 0 a b c", "Say 1 a b c"], hidden=32, layers=1, vocab_size=300)
    arguments = ["train", "--name", "mine", "--prompts", "2", "--group-size", "4", "--json"]
    arguments += ["--set", "guards.patience=9"]  # the random model seldom ends an answer
    arguments += ["--limit", "max_completion_tokens=6", "--set", "objective.objective=./objective.py:HALF"]
    told, _ = invoke(*arguments, "--model", "tiny", "--env", "./env.py:Words max_turns=1", "--steps", "4")
    assert json.loads(told.splitlines()[-1])["steps"] == 4
    rows = read_metrics(here / "home" / "trainings" / "mine" / METRICS)
    assert all(0.5 <= row["reward_mean"] <= 0.8 for row in rows)
    assert any(row.get("grad_norm", 0) > 0 for row in rows)
    (here / "home" / "checkpoints" / "mine").rename(here / "earlier")
    (here / "env.py").write_text(ENVIRONMENT.replace("0.3 *", "0.2 *"))
    extension_points._module.cache_clear()  # as in another process
    extension_points._sources.clear()
    _, said = invoke(*arguments, "--resume", "--steps", "5")
    assert f"{here}/env.py changed since step 4 was saved" in said
    assert "objective.py changed" not in said


# ------------------------------------------------------------------------------------ suites, tasks

SUITE = """
from nano_rl.tasks.suite import *
from nano_shared.hidden_checks import AnswerChecks

def raises(rng, split, level): return [][level]
def nothing(rng, split, level): return None
def blank(rng, split, level): return Made(prompt=" ", hidden=AnswerChecks(answer=1), oracle=())
def same(rng, split, level):
    print("MADE")
    return Made(prompt="?", hidden=AnswerChecks(answer=rng.random()), oracle=(), program=("", "sha256:1"))

def suite(make): return TaskSuite(name="mine", version="1", about="", views=(View("v", 0, make),))

RAISES, NOTHING, BLANK, SAME = map(suite, (raises, nothing, blank, same))
"""


def test_a_suite_that_makes_no_task_is_named_and_one_program_is_said(here: Path) -> None:
    (here / "suite.py").write_text(SUITE)
    make = ["tasks", "make", "-n", "10", "--suite"]
    for name, said in (
        ("RAISES", r"suite mine, view v, raised IndexError: .* \(suite\.py, line 5\)"),
        ("NOTHING", "made of type NoneType, and must return a Made"),
        ("BLANK", "made no task: prompt: .*must not be blank"),
        ("SAM", "defines no 'SAM'; what fits there is SAME, RAISES"),
    ):
        with pytest.raises(NanoError, match=said):
            invoke(*make, f"./suite.py:{name}")
    _, said = invoke(*make, "suite:SAME")
    assert "all 10 tasks are of one program" in said


def test_a_task_file_of_ours_is_imported_with_its_checks(here: Path) -> None:
    write_tasks(here / "own.jsonl", [ADD])
    invoke("tasks", "import", "own.jsonl")
    assert read_tasks(here / "own.jsonl.tasks.jsonl") == [ADD]
    with pytest.raises(UsageError, match="whose checks this format cannot carry; leave --from out"):
        invoke("tasks", "import", "own.jsonl", "--from", "trl")
