"""`nano-rl rollout`: run a policy, or the tasks' oracles, and log every execution with its verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nano_coder.run.reflection import is_reflection
from nano_rl.checkpoints.evaluate import component_means, row_of, table
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
    tool_option,
)  # fmt: skip
from nano_rl.gather.rollouts import collect, execute
from nano_rl.rewards import outcome
from nano_rl.tasks.make import read_tasks
from nano_rl.tasks.oracle import ORACLE, oracle_policy
from nano_shared.command_line import limit_option
from nano_shared.errors import UsageError
from nano_shared.types import Trajectory, Value


class Worth(Value):
    """Success before and after reflection, over the first attempts that were graded."""

    graded: int
    first: float
    """share of the first attempts that passed"""
    reflected: float
    """the same where a failed run counts as the mean of its second attempts"""

    def __str__(self) -> str:
        return f"solved at first: {self.first:.1%}; with reflection: {self.reflected:.1%} of {self.graded}"


def split_attempts(runs: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """First attempts, and second ones."""
    return [r for r in runs if not is_reflection(r)], [r for r in runs if is_reflection(r)]


def worth_of(runs: Sequence[Trajectory]) -> Worth:
    """Of runs as `rollout.collect` returns them; runs without an outcome (failures of ours) are left out."""
    first, second = split_attempts(runs)
    again: dict[str | None, list[float]] = defaultdict(list)
    for run in second:
        if (value := outcome(run.verdict)) is not None:
            again[run.parent].append(float(value == 1.0))
    before = {r.id: float(value == 1.0) for r in first if (value := outcome(r.verdict)) is not None}
    after = [passed or _mean(again.get(run, [])) for run, passed in before.items()]
    return Worth(graded=len(before), first=_mean(list(before.values())), reflected=_mean(after))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


@click.command("rollout")
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), required=True)
@model_option
@click.option("--base-url", help="URL of an OpenAI-compatible endpoint.")
@click.option("--oracle", is_flag=True, help="Run each task's own solution instead of a model.")
@click.option("--group-size", type=click.IntRange(1), default=1, show_default=True, help="Runs of each task.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True)
@max_tokens_option
@tool_option
@limit_option
@click.option(
    "--reflect", type=click.IntRange(0), is_flag=False, flag_value=1, default=0, metavar="[N]",
    help="Of each run that fails, N second attempts (1) that read its diff and the check's output: a group.",
)  # fmt: skip
@reward_option
@seed_option
@dtype_option
@log_option
def command(
    tasks_file: Path, model: str | None, base_url: str | None, oracle: bool, group_size: int,
    temperature: float, max_tokens: int | None, tools: tuple[str, ...], limit: dict[str, Any], reflect: int,
    reward: str | None, seed: int, dtype: str, log: str | None,
) -> int:  # fmt: skip
    """Run each task of a file GROUP_SIZE times; the runs and their verdicts are in the log."""
    if oracle and reflect:
        raise UsageError("--reflect: oracles do not fail, so no attempt follows; leave out one of the two")
    tasks = read_tasks(tasks_file)
    composed = chosen_reward(reward)
    with bar("rollouts", len(tasks) * (1 if oracle else group_size)) as progress:

        def done(run: Trajectory) -> None:
            if not is_reflection(run):
                progress.advance(str(run.stop))

        if oracle:
            from nano_rl.commands.session import oracle_runtime

            runtime = replace(oracle_runtime(log), policy_name=ORACLE)
            policies = [oracle_policy(t, runtime.profile) for t in tasks]
            runs = execute(tasks, policies, runtime, on_run=done, reward=composed)
        else:
            runtime = policy_runtime(
                model, log, base_url=base_url, dtype=dtype, temperature=temperature, max_tokens=max_tokens,
                limit=limit, tools=tools,
            )  # fmt: skip
            runs = collect(
                tasks, runtime, group_size=group_size, seed=seed, on_run=done, reward=composed,
                reflect=reflect,
            )  # fmt: skip
    tell_ungraded(runs)
    first, second = split_attempts(runs)
    print_rows([*table(first), *([row_of("second attempts", second)] if second else [])])
    if reflect:
        print(worth_of(runs))
    if composed:
        print_components(component_means(runs))
    return 0
