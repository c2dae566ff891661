"""`nano-rl eval`: success on tasks with intervals, and paired against a baseline."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from typer import Option

from nano_coder.commands.options import Setup, agent_options
from nano_coder.environment import Environments
from nano_coder.models.opening import default_model
from nano_coder.run.execution import with_limits
from nano_coder.tools.tool import TOOLS
from nano_rl.checkpoints.evaluate import (
    Conditions,
    Evaluation,
    component_means,
    make_evaluation,
    store_evaluation,
    table,
    tasks_hash,
)
from nano_rl.checkpoints.evaluate import SuccessRow as Row
from nano_rl.checkpoints.promotion import SuccessDifference as Difference
from nano_rl.checkpoints.promotion import compare
from nano_rl.command_setup import all_tasks, chosen_reward, dtype_of, look_first, policy_runtime
from nano_rl.commands.options import EnvOption, RewardOption, Seed, Tasks
from nano_rl.commands.progress import LOGGED, bar, print_components, print_rows, tell_ungraded
from nano_rl.gather.rollouts import collect, number_of_runs
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.policy import InterfaceProfile
from nano_shared.types import Split, Task, Trajectory

Temperature = Annotated[float, Option(min=0, max=100, help="Of the sampling; 0 is greedy.")]
Repeat = Annotated[int, Option(min=1, help="Runs of each task, seeded.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    tasks: list[Task]
    environments: Environments = field(default_factory=Environments)
    setup: Setup
    reward: str | None
    seed: int
    repeat: int
    temperature: float
    without: tuple[str, ...] = ()
    """tools that are not offered"""

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UsageError("the file holds no tasks, so there is nothing to evaluate on")
        if self.repeat > 1 and self.temperature == 0:
            raise UsageError(
                "--repeat needs a --temperature above 0: greedy runs of one task are all the same"
            )

    def evaluate(self, model: str | None) -> tuple[Evaluation, list[Trajectory]]:
        composed = chosen_reward(self.reward, self.tasks)
        name = model or self.setup.config.model or default_model()
        config, sources = self.setup.config, self.setup.sources
        runtime = policy_runtime(config, sources, model=name, temperature=self.temperature)
        runtime = replace(runtime, environments=self.environments)
        tasks = [with_limits(task, runtime.settings.limits) for task in self.tasks]
        if self.without:
            tasks = [without_tools(task, self.without, runtime.profile) for task in tasks]
        with bar(f"eval {name}", number_of_runs(tasks) * self.repeat, LOGGED) as progress:
            runs = collect(
                tasks, runtime, group_size=self.repeat, seed=self.seed, reward=composed,
                on_run=lambda t: progress.advance(),
            )  # fmt: skip
        tell_ungraded(runs)
        conditions = Conditions(
            tasks_hash=tasks_hash(tasks), seed=self.seed, repeat=self.repeat, reward=self.reward,
            temperature=runtime.sampling.temperature, max_tokens=runtime.sampling.max_tokens,
            dtype=dtype_of(config, sources),
        )  # fmt: skip
        evaluation = make_evaluation(name, tasks, runs, runtime, conditions)
        store_evaluation(evaluation)
        return evaluation, runs


@agent_options("model", "base_url", "device", "net", "log", "agent", "agent_folders")
def command(
    setup: Setup,
    tasks: Tasks = None,
    env: EnvOption = None,
    against: Annotated[str | None, Option(help="Another model: the paired difference is reported.")] = None,
    temperature: Temperature = 0.0,
    repeat: Repeat = 1,
    reward: RewardOption = None,
    seed: Seed = 0,
    without: Annotated[
        str | None,
        Option(help="Tools left out, with commas: what they are worth. memory is remember,recall."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Run a model on each task of a file, or of environments, and report success with 95 % intervals.

    What it did is kept in NANO_HOME/evaluations; with --against, nano-rl checkpoints promote finds it there.
    """
    look_first(files=(tasks,), models=(setup.config.model, against))
    environments, work = all_tasks(tasks, env, Split.TEST, seed)
    evaluator = Evaluator(
        tasks=work, environments=environments, setup=setup, reward=reward, seed=seed, repeat=repeat,
        temperature=temperature, without=tool_names(without),
    )  # fmt: skip
    evaluation, runs = evaluator.evaluate(None)
    rows = table(runs)
    components = component_means(runs) if evaluator.reward else {}
    report: dict[str, Any] = {"evaluation": evaluation.id, "rows": [vars_of(row) for row in rows]}
    if components:
        report["components"] = components
    found = None
    if against:
        other, other_runs = evaluator.evaluate(against)
        found = compare(evaluation, other)
        report["difference"] = {name: getattr(found.overall, name) for name in ("mean", "low", "high")}
        report["suites"] = [suite.model_dump() for suite in found.suites]
        other_rows = table(other_runs)
        report["against"] = [vars_of(row) for row in other_rows]

    def show() -> None:
        print_rows(rows)
        if components:
            print_components(components)
        if found:
            print(f"\nagainst {against}:")
            print_rows(other_rows)
            print_differences(found.overall, found.suites)

    emit(report, as_json, show)
    return 0


def tool_names(given: str | None) -> tuple[str, ...]:
    """The tools of `--without`. Raises UsageError for a word that is no tool, and for `submit`."""
    words = (given or "").replace("memory", "remember,recall").split(",")
    names = tuple(word.strip() for word in words if word.strip())
    if wrong := [name for name in names if name not in TOOLS or name == "submit"]:
        why = "ends every run" if wrong[0] == "submit" else "is no tool; nano-coder tools lists them"
        raise UsageError(f"--without {wrong[0]}: it {why}")
    return names


def without_tools(task: Task, names: Collection[str], profile: InterfaceProfile) -> Task:
    """The task, and those before it, without some of the tools that they or the profile offer."""
    offered = task.tools if task.tools is not None else tuple(tool.name for tool in profile.tools)
    tools = tuple(name for name in offered if name not in names)
    earlier = tuple(without_tools(one, names, profile) for one in task.earlier)
    return task.model_copy(update={"tools": tools, "earlier": earlier})


def print_differences(overall: Difference, suites: tuple[Difference, ...]) -> None:
    print(f"\ndifference: {overall}, paired")
    for suite in suites if len(suites) > 1 else ():
        print(f"  {suite.name}: {suite}")


def vars_of(row: Row) -> dict[str, Any]:
    return {**asdict(row), "rate": row.rate if row.graded else None}
