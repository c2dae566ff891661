"""`nano-coder fork`: sample other continuations from a step of a run."""

from __future__ import annotations

import json
from typing import Annotated, Any

from typer import Option

from nano_coder.commands.display import exit_code, outcome
from nano_coder.commands.options import (
    Limit,
    RunArgument,
    ToolOption,
    agent_options,
    configured,
    reopen_runtime,
)
from nano_coder.config import AgentConfig, said_limits
from nano_coder.run.execution import with_limits
from nano_shared.command_line import JsonOption
from nano_shared.console import Console
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.printable import printable
from nano_shared.settings_options import Settings
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


@agent_options("model", "base_url", "temperature", "net", "log")
def command(
    run: RunArgument,
    settings: Settings[AgentConfig],
    at: Annotated[int, Option(metavar="STEP", help="As `log show` counts them; 0 is the start.")],
    n: Annotated[int, Option("--n", min=1, help="Continuations.")] = 8,
    seed: Annotated[
        int | None, Option(help="Seed of the sampling; without it each call samples anew.")
    ] = None,
    check: Annotated[
        str | None, Option(help="Shell line that grades the forks, which do not see it; else as the run was.")
    ] = None,
    as_json: JsonOption = False,
    limit: Limit = None,
    tools: ToolOption = None,
) -> int:
    """Sample N continuations of RUN (an id, the beginning of one, or `last`) from after STEP.

    Files and tokens are restored exactly: the first tokens of each fork are those of the log. Each is a run
    of its own that names its parent and the step; forks of one step form a group that can be trained on.
    Without --temperature they are sampled at 1. Exit code 0 where one succeeds, 1 where none does.
    """
    from nano_coder.run.fork import fork_run, refuse_step

    config, sources = configured(settings, limit=limit, tools=tools)
    if check is not None and not check.strip():
        raise UsageError("--check is empty; give a shell line, or leave it out to grade as the run was")
    if sources["temperature"] == "default":
        config = config.model_copy(update={"temperature": 1.0})
    store = LogStore.open(config.log, create=False)
    parent, limits = store.get(run), said_limits(config, sources)
    parent = parent.model_copy(update={"task": with_limits(parent.task, limits)})
    refuse_step(parent, at)  # before the model is loaded, which takes seconds
    try:
        runtime = reopen_runtime(parent, config, sources, store)
    except UsageError as problem:
        if config.model or isinstance(problem, CheckpointError):
            raise
        raise UsageError(
            f"run {parent.id} was made by {parent.policy!r}, which is not at hand; name a model with --model"
            f" ({problem})"
        ) from None
    console = Console(quiet=as_json, soft_wrap=True)
    forks = fork_run(
        parent, runtime, at=at, n=n, seed=seed, check=check, on_run=lambda fork: _line(console, fork)
    )
    scored = [fork.reward for fork in forks if fork.reward is not None]
    succeeded = sum(exit_code(fork) == 0 for fork in forks)
    if as_json:
        print(json.dumps(_report(parent, at, forks, succeeded)))
    else:
        unscored = f", {n - len(scored)} without a reward" if len(scored) < n else ""
        console.print(
            f"{succeeded} of {n} forks of {parent.id} at step {at} succeeded ({succeeded / n:.0%}){unscored}"
        )
    return int(succeeded == 0)


def _line(console: Console, fork: Trajectory) -> None:
    reward = "-" if fork.reward is None else f"{fork.reward:g}"
    end = printable(f"{fork.stop}{f' ({fork.stop_detail})' if fork.stop_detail else ''}")
    console.print(
        f"fork {fork.id}: reward {reward}, {len(fork.own_turns)} turns, {fork.num_sampled_tokens} tokens,"
        f" {end}; check: {printable(outcome(fork))}"
    )


def _report(parent: Trajectory, at: int, forks: list[Trajectory], succeeded: int) -> dict[str, Any]:
    return {
        "parent": parent.id,
        "step": at,
        "group": forks[0].group_key,
        "forks": [
            {
                "run": fork.id,
                "seed": fork.seed,
                "stop": fork.stop,
                "reward": fork.reward,
                "turns": len(fork.own_turns),
                "sampled_tokens": fork.num_sampled_tokens,
                "trust": fork.verdict.trust if fork.verdict else None,
            }
            for fork in forks
        ],
        "succeeded": succeeded,
        "success_rate": succeeded / len(forks),
    }
