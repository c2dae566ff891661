"""`nano-rl eval`: success on tasks with intervals, and paired against a baseline."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from nano_coder.config import load_config
from nano_coder.models.opening import default_model
from nano_coder.run.execution import with_limits
from nano_rl.checkpoints.evaluate import SuccessRow as Row
from nano_rl.checkpoints.evaluate import component_means, table
from nano_rl.checkpoints.evaluations import (
    Conditions,
    Evaluation,
    make_evaluation,
    store_evaluation,
    tasks_hash,
)
from nano_rl.checkpoints.promotion import SuccessDifference as Difference
from nano_rl.checkpoints.promotion import compare
from nano_rl.commands.progress import bar, print_components, print_rows, tell_ungraded
from nano_rl.commands.session import (
    chosen_reward,
    dtype_option,
    log_option,
    max_tokens_option,
    model_option,
    policy_runtime,
    reward_option,
    seed_option,
)  # fmt: skip
from nano_rl.gather.rollouts import collect
from nano_rl.tasks.make import read_tasks
from nano_shared.command_line import limit_option
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory

_HOW = (
    click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True),
    click.option(
        "--repeat", type=click.IntRange(1), default=1, show_default=True, help="Runs of each task, seeded."
    ),
    max_tokens_option,
    limit_option,
    reward_option,
    seed_option,
    dtype_option,
    log_option,
)


def how_options(function: Any) -> Any:
    """The options that say how a model is run to be evaluated."""
    for option in reversed(_HOW):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Which tasks, and how a model is run on them."""

    tasks: list[Task]
    log: str | None
    reward: str | None
    seed: int
    repeat: int
    temperature: float
    max_tokens: int | None
    limit: dict[str, Any]
    dtype: str

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UsageError("the file holds no tasks, so there is nothing to evaluate on")
        if self.repeat > 1 and self.temperature == 0:
            raise UsageError(
                "--repeat needs a --temperature above 0: greedy runs of one task are all the same"
            )

    def evaluate(self, model: str | None, base_url: str | None = None) -> tuple[Evaluation, list[Trajectory]]:
        """Run a model on the tasks, keep the evaluation, and give it with its runs."""
        composed = chosen_reward(self.reward)
        name = model or load_config({}, Path())[0].model or default_model()
        runtime = policy_runtime(
            name, self.log, base_url=base_url, dtype=self.dtype, temperature=self.temperature,
            max_tokens=self.max_tokens, limit=self.limit,
        )  # fmt: skip
        tasks = [with_limits(task, runtime.limits) for task in self.tasks]
        with bar(f"eval {name}", len(self.tasks) * self.repeat) as progress:
            runs = collect(
                tasks, runtime, group_size=self.repeat, seed=self.seed, reward=composed,
                on_run=lambda t: progress.advance(),
            )  # fmt: skip
        tell_ungraded(runs)
        conditions = Conditions(
            tasks_hash=tasks_hash(tasks), seed=self.seed, repeat=self.repeat,
            temperature=self.temperature, max_tokens=runtime.sampling.max_tokens, dtype=self.dtype,
            reward=self.reward,
        )  # fmt: skip
        evaluation = make_evaluation(name, tasks, runs, runtime, conditions)
        store_evaluation(evaluation)
        return evaluation, runs


@click.command("eval")
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), required=True)
@model_option
@click.option("--against", help="Another model: the paired difference is reported.")
@click.option("--base-url", help="URL of an OpenAI-compatible endpoint.")
@how_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    tasks_file: Path, model: str | None, against: str | None, base_url: str | None, as_json: bool, **how: Any
) -> int:
    """Run a model on each task of a file and report success with 95 % intervals.

    What it did is kept in NANO_HOME/evaluations; with --against, nano-rl checkpoints promote finds it there.
    """
    setting = How(tasks=read_tasks(tasks_file), **how)
    evaluation, runs = setting.evaluate(model, base_url)
    rows = table(runs)
    components = component_means(runs) if setting.reward else {}
    report: dict[str, Any] = {"evaluation": evaluation.id, "rows": [vars_of(row) for row in rows]}
    if components:
        report["components"] = components
    if not as_json:
        print_rows(rows)
        if components:
            print_components(components)
    if against:
        other, other_runs = setting.evaluate(against, base_url)
        found = compare(evaluation, other)
        report["difference"] = {name: getattr(found.overall, name) for name in ("mean", "low", "high")}
        report["suites"] = [suite.model_dump() for suite in found.suites]
        report["against"] = [vars_of(row) for row in table(other_runs)]
        if not as_json:
            print(f"\nagainst {against}:")
            print_rows(table(other_runs))
            print_differences(found.overall, found.suites)
    if as_json:
        print(json.dumps(report))
    return 0


def print_differences(overall: Difference, suites: tuple[Difference, ...]) -> None:
    """The paired difference, and that of each suite where there are several."""
    print(f"\ndifference: {overall}, paired")
    for suite in suites if len(suites) > 1 else ():
        print(f"  {suite.name}: {suite}")


def vars_of(row: Row) -> dict[str, Any]:
    return {**asdict(row), "rate": row.rate if row.graded else None}
