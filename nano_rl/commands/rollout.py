"""`nano-rl rollout`: run a policy, or the tasks' oracles, and log every execution with its verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nano_coder.runtime import is_reflection
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
)  # fmt: skip
from nano_rl.imitation.oracle import ORACLE, oracle_policy
from nano_rl.reflection import split_attempts, worth_of
from nano_rl.rollout import collect, execute
from nano_rl.tasks import read_tasks
from nano_shared.errors import UsageError
from nano_shared.limit_option import limit_option
from nano_shared.types import Trajectory


@click.command("rollout")
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), required=True)
@model_option
@click.option("--base-url", help="URL of an OpenAI-compatible endpoint.")
@click.option("--oracle", is_flag=True, help="Run each task's own solution instead of a model.")
@click.option("--group-size", type=click.IntRange(1), default=1, show_default=True, help="Runs of each task.")
@click.option("--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True)
@max_tokens_option
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
    temperature: float, max_tokens: int | None, limit: dict[str, Any], reflect: int,
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
            from nano_rl.commands.oracles import oracle_runtime

            runtime = replace(oracle_runtime(log), policy_name=ORACLE)
            policies = [oracle_policy(t, runtime.profile) for t in tasks]
            runs = execute(tasks, policies, runtime, on_run=done, reward=composed)
        else:
            runtime = policy_runtime(
                model, log, base_url=base_url, dtype=dtype, temperature=temperature, max_tokens=max_tokens,
                limit=limit,
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
