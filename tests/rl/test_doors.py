"""Advantages, curricula, sinks and objectives of a package that is not ours, and what is refused."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import flat_batch, flat_logprobs, trajectory, turn
from typer.testing import CliRunner

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_rl.cli import cli
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import curriculum_state, draw_tasks, open_curriculum
from nano_rl.learn.advantages import group_credit, probe_advantage
from nano_rl.learn.groups import Group
from nano_rl.learn.loss import mean_metrics, policy_loss, probe_objective
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.learn.objectives import find_objective
from nano_rl.training_record import TrainingView, Watcher, open_sinks, read_record
from nano_shared import extension_points
from nano_shared.errors import ConfigError, UsageError
from nano_shared.settings import parse_config
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
POOL = [Task(key=f"task-{n}", prompt="Do it.") for n in range(6)]
CONFIG = TrainConfig(prompts_per_step=2, group_size=2)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package, installed as far as Python can tell."""
    groups = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "site" / "nano_example_plugins-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nano-example-plugins\nVersion: 0.1.0\n")
    lines = [line for group, of in groups.items() for line in (f"[{group}]", *(f"{k} = {of[k]}" for k in of))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.syspath_prepend(EXAMPLES / "src")
    caches = (extension_points._entry_points, extension_points._registered)
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def written(source: str) -> str:
        (file := tmp_path / "mine.py").write_text(source)
        extension_points._module.cache_clear()
        return f"{file}:f"

    return written


def group(*rewards: float | None) -> Group:
    runs = (
        trajectory(turn(2, 3), turn(1, 2, index=1), run_id=f"r{n}", reward=r) for n, r in enumerate(rewards)
    )
    return Group(task_key="task-0", trajectories=tuple(runs))


# ------------------------------------------------------------------------------------------- advantages


def test_an_advantage_of_a_package_credits_the_scored_rollouts(package: None) -> None:
    chosen = parse_config(TrainConfig, {"objective": {"objective": "grpo+median"}}).objective.terms
    assert (chosen.beta, chosen.aggregation) == (0.04, "sequence")
    # the median is 0 and the mean distance from it 1/3
    assert group_credit(group(0.0, 1.0, None, 0.0), chosen, None) == [0.0, pytest.approx(3.0), None, 0.0]
    assert group_credit(group(None, None), chosen, None) == [None, None]
    probe_advantage(chosen)


def test_ours_have_names_too() -> None:
    rewards = (0.0, 1.0, 1.0, 0.0)
    rloo = group_credit(group(*rewards), find_objective("dapo+rloo"), None)
    assert rloo == pytest.approx([-2 / 3, 2 / 3, 2 / 3, -2 / 3])
    for name in ("recipe", "grpo"):
        ours = find_objective(f"{name}+{'mean' if name == 'recipe' else 'std'}")
        assert group_credit(group(*rewards), ours, None) == group_credit(
            group(*rewards), find_objective(name), None
        )


def test_an_advantage_may_be_one_for_each_turn_or_leave_a_rollout_out(write: Callable[[str], str]) -> None:
    source = (
        "import torch\ndef f(rewards_G, runs_G): return [None, torch.tensor([r, 2.0])[:len(runs_G[0].turns)]"
    )
    name = write(source.replace("[r, 2.0]", "[rewards_G[1], 2.0]") + "]")
    assert group_credit(group(0.0, 1.0), find_objective(f"recipe+{name}"), None) == [None, [1.0, 2.0]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return rewards_G[:1]", "returned 1 values for 4 rollouts; it must return a list"),
        ("return None", "returned what is of type NoneType for 4 rollouts"),
        ("return [float('nan')] * len(rewards_G)", "returned nan for a rollout of 2 turns"),
        ("return [[1.0] * 3 for run in runs_G]", r"returned \[1.0, 1.0, 1.0\] for a rollout of 2 turns"),
        ("return ['a' for run in runs_G]", "returned 'a' for a rollout"),
        ("return [1 / (r - rewards_G[0]) for r in rewards_G]", r"raised ZeroDivisionError.*mine.py, line 1"),
    ],
)
def test_an_advantage_of_another_shape_is_refused_before_a_model_is_loaded(
    body: str, said: str, write: Callable[[str], str]
) -> None:
    with pytest.raises(UsageError, match=f"^the advantage f {said}"):
        probe_advantage(find_objective("recipe+" + write(f"def f(rewards_G, runs_G): {body}")))


def test_what_is_not_in_made_up_rollouts_is_only_said(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = write("def f(rewards_G, runs_G): return [run.verdict.components['tests'] for run in runs_G]")
    probe_advantage(find_objective(f"recipe+{name}"))
    assert "the advantage f raised KeyError: 'tests'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grpo+medain", r"nano\.advantages has no 'medain'; there are median, "),
        ("ppo+median", "ppo.median has an advantage, which takes the place of a critic"),
        ("tahn+median", r"nano\.objectives has no 'tahn'; there are tanh, "),
        ("grpo+json:dumps", r"is called with \(rewards_G, runs_G\), and takes \(obj, "),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(package: None, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_objective(name)
    result = CliRunner().invoke(cli, ["train", "--name", "x", "--tasks", "x", "--objective", name])
    assert isinstance(result.exception, UsageError)


# ------------------------------------------------------------------------------------------- objectives


def test_an_objective_reads_the_reference_and_returns_metrics(package: None) -> None:
    chosen = find_objective("tanh")
    probe_objective(chosen)
    assert (chosen.beta, chosen.reads_reference) == (0.0, True)
    batch = flat_batch([1.0, -1.0], behaviour=[-1.0, -2.0], reference=[-1.5, -1.0])
    loss, metrics = policy_loss(flat_logprobs([-1.0, -2.0]), batch, chosen)
    assert loss.item() == 0.0  # the ratio is 1
    assert mean_metrics([metrics, metrics])["objective_drift"] == pytest.approx((0.5 - 1.0) / 2)
    with pytest.raises(ValueError, match="needs reference_logprobs_BT"):
        policy_loss(flat_logprobs([-1.0]), flat_batch([1.0]), chosen)


def test_metrics_that_are_none_are_refused_before_a_model_is_loaded(write: Callable[[str], str]) -> None:
    source = (
        "from nano_rl.learn.objectives import Objective\n"
        "def g(new_N, ratio_N, advantages_N, config): return -ratio_N * advantages_N, {}\n"
        "f = Objective(surrogate=g)\n"
    )
    for metrics, said in (("3", "metrics of type int"), ("{'a': [1, 2]}", "a metric 'a' that is neither")):
        with pytest.raises(UsageError, match=f"the surrogate g returned {said}"):
            probe_objective(find_objective(write(source.replace("{}", metrics))))
    probe_objective(find_objective(write(source.replace("{}", "{'a': 1.0, 'b_max': ratio_N}"))))


# ------------------------------------------------------------------------------------------- curricula


def test_a_curriculum_of_a_package_draws_by_results_and_goes_on_from_its_state(package: None) -> None:
    chosen = open_curriculum("weakest", POOL, CONFIG)
    assert [task.key for task in draw_tasks(chosen, POOL, 0, 2)] == ["task-0", "task-1"]
    chosen.record([group(1.0, 0.0)])
    assert draw_tasks(chosen, POOL, 1, 6)[-1].key == "task-0"
    again = open_curriculum("weakest", POOL, CONFIG)
    again.restore(curriculum_state(chosen))
    assert again.state() == chosen.state() == {"task-0": 0.5}


CURRICULUM = """
from nano_shared.types import Task
class f:
    made = 0
    def __init__(self, tasks, seed):
        f.made += 1
        self.tasks, self.place, self.number = tasks, 0, f.made
    def draw(self, step, count, *, taken=()):
        BODY
    def record(self, groups): ...
    def state(self): return STATE
    def restore(self, state): self.place = state
"""


@pytest.mark.parametrize(
    ("body", "state", "said"),
    [
        ("return None", "0", "the curriculum f drew nothing for step 0, where 2 of 6 were asked for"),
        ("return []", "0", "the curriculum f drew nothing for step 0"),
        ("return 3", "0", "the curriculum f drew what is of type int for step 0"),
        ("return self.tasks[:3]", "0", "the curriculum f drew 3 tasks for step 0"),
        ("return self.tasks[:1] * 2", "0", "the curriculum f drew a task that the step has already"),
        ("return [Task(key='task-0', prompt='?')]", "0", "the curriculum f drew what is none of the tasks"),
        ("return self.nope", "0", "the curriculum f raised AttributeError: .*mine.py, line 9"),
        ("return self.tasks[:2]", "{1}", "the curriculum f has a state that is no JSON"),
        (
            "self.place += 1; return self.tasks[self.place : self.place + 2]", "3",
            "draws other tasks once its state was saved and restored",
        ),
        (
            "return self.tasks[self.number % 5 :][:2]", "self.place",
            "draws other tasks once its state was saved and restored",
        ),
    ],
)  # fmt: skip
def test_a_curriculum_that_cannot_be_used_is_refused_before_work(
    body: str, state: str, said: str, write: Callable[[str], str]
) -> None:
    source = CURRICULUM.replace("BODY", body).replace("STATE", state)
    with pytest.raises(UsageError, match=said):
        open_curriculum(write(source), POOL, CONFIG)
    good = CURRICULUM.replace("BODY", "self.place += 1; return self.tasks[self.place :][:count]")
    assert open_curriculum(write(good.replace("STATE", "self.place")), POOL, CONFIG)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class f: ...", r"is called with \(tasks, seed\), and takes \(\)"),
        (
            "def f(tasks, seed): return tasks",
            "made what is of type list, without draw, record, state, restore",
        ),
        ("def g(): ...", "defines no 'f'"),
    ],
)
def test_what_is_no_curriculum_is_named(source: str, said: str, write: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match=f"--curriculum.*{said}"):
        open_curriculum(write(source), POOL, CONFIG)


# ------------------------------------------------------------------------------------------- sinks


class Full:
    """A sink whose disk is full, as it says each time."""

    def __init__(self, *_: object) -> None:
        self.asked: list[Any] = []

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.asked.append((step, metrics))
        raise OSError("no space left")

    def close(self) -> None:
        self.asked.append("close")
        raise OSError("no space left")


def test_a_sink_that_raises_is_said_once_and_the_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = [Full(), Full()]
    with Watcher(tmp_path, TrainingView(), sinks, done=0) as watch:
        watch.on_step(1, 2, {"loss": 0.5, "entropy": math.nan})
        watch.on_step(2, 2, {"loss": 0.25})
    assert [sink.asked for sink in sinks] == [[(0, {"loss": 0.5}), (1, {"loss": 0.25}), "close"]] * 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.startswith("nano: the sink Full raised OSError: no space left (") for line in said)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(name, folder, settings): 1 / 0", "raised ZeroDivisionError"),
        ("def f(name, folder, settings): return 3", r"made what is of type int; a sink has write\(step"),
        ("def f(name): ...", r"is called with \(name, folder, settings\), and takes \(name\)"),
    ],
)
def test_what_is_no_sink_is_refused_before_work(
    source: str, said: str, write: Callable[[str], str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--log-to.*{said}"):
        open_sinks([write(source)], name="x", folder=tmp_path, settings={})


# ------------------------------------------------------------------------------------------- all of them


def test_a_training_takes_all_four_and_goes_on(
    package: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    tasks = make_tasks(levels=[0], n=4, seed=1, split=Split.TRAIN, views=["copy"])
    Path("tasks.jsonl").write_text("".join(task.model_dump_json() + "\n" for task in tasks))
    texts = [m.content for t in tasks for m in first_messages(COMPACT_1, t, ())]
    build_tiny(tmp_path / "tiny", texts, hidden=32, layers=1, max_positions=200, vocab_size=300)

    def train(*arguments: str) -> dict[str, Any]:
        shared = (
            "--limit",
            "max_turns=1",
            "--limit",
            "max_completion_tokens=4",
            "--log-to",
            "table",
            "--json",
        )
        result = CliRunner().invoke(
            cli, ["train", "--name", "mine", *arguments, *shared], catch_exceptions=False
        )
        told: dict[str, Any] = json.loads(result.stdout)
        return told

    train(
        "--model", "tiny", "--tasks", "tasks.jsonl", "--steps", "1", "--prompts", "2", "--group-size", "2",
        "--objective", "tanh+median", "--curriculum", "weakest", "--set", "guards.patience=9",
    )  # fmt: skip
    folder = tmp_path / "home" / "trainings" / "mine"
    record = read_record(folder)
    assert record is not None
    assert record.curriculum == "weakest"
    train("--resume", "--steps", "2")
    assert [row["step"] for row in read_metrics(folder / METRICS)] == [0, 1]
    lines = [line.split("\t") for line in Path("mine.tsv").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == [0, 1]
    used = [json.loads(line)["groups"] for line in (folder / "used.jsonl").read_text().splitlines()]
    assert len({group["task"] for step in used for group in step}) == 4, "those never drawn come first"
