"""`nano-rl eval`: success on tasks with intervals, and paired against a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import click

from nano_coder.runtime import Runtime
from nano_rl.commands.progress import bar, print_components, print_rows
from nano_rl.commands.session import (
    chosen_reward,
    dtype_option,
    log_option,
    model_option,
    policy_runtime,
    reward_option,
    seed_option,
)  # fmt: skip
from nano_rl.evaluate import component_means, paired, table
from nano_rl.rewards import Reward
from nano_rl.rollout import collect
from nano_rl.tasks import read_tasks
from nano_shared.types import Task, Trajectory


@click.command("eval")
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), required=True)
@model_option
@click.option("--against", help="Another model: the paired difference is reported.")
@click.option("--base-url", help="URL of an OpenAI-compatible endpoint.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option(
    "--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Of one completion."
)
@reward_option
@seed_option
@dtype_option
@log_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    tasks_file: Path, model: str | None, against: str | None, base_url: str | None, temperature: float,
    max_tokens: int, reward: str | None, seed: int, dtype: str, log: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Run a model once on each task of a file and report success with 95 % intervals."""
    tasks = read_tasks(tasks_file)
    composed = chosen_reward(reward)
    runtime = policy_runtime(
        model, log, base_url=base_url, dtype=dtype, temperature=temperature, max_tokens=max_tokens
    )
    runs = _run(tasks, runtime, seed, composed)
    rows = table(runs)
    other: list[Trajectory] = []
    if against:
        runtime = policy_runtime(
            against, log, base_url=base_url, dtype=dtype, temperature=temperature, max_tokens=max_tokens
        )
        other = _run(tasks, runtime, seed, composed)
    if as_json:
        parts = {"components": component_means(runs)} if composed else {}
        print(json.dumps({**_report(rows, runs, other), **parts}))
        return 0
    print_rows(rows)
    if composed:
        print_components(component_means(runs))
    if other:
        print(f"\nagainst {against}:")
        print_rows(table(other))
        mean, low, high = paired(runs, other)
        print(f"\ndifference: {mean:+.1%} (95 % interval {low:+.1%} to {high:+.1%}, paired)")
    return 0


def _run(tasks: list[Task], runtime: Runtime, seed: int, reward: Reward | None) -> list[Trajectory]:
    with bar(f"eval {runtime.policy_name}", len(tasks)) as progress:
        return collect(tasks, runtime, seed=seed, on_run=lambda t: progress.advance(), reward=reward)


def _report(rows: list, runs: list[Trajectory], other: list[Trajectory]) -> dict:  # type: ignore[type-arg]
    report = {"rows": [vars_of(row) for row in rows]}
    if other:
        mean, low, high = paired(runs, other)
        report["difference"] = {"mean": mean, "low": low, "high": high}  # type: ignore[assignment]
        report["against"] = [vars_of(row) for row in table(other)]
    return report


def vars_of(row) -> dict:  # type: ignore[no-untyped-def,type-arg]
    from dataclasses import asdict

    return {**asdict(row), "rate": row.rate}
