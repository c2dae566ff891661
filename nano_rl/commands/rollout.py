"""`nano-rl rollout`: run a policy, or the tasks' oracles, and log every execution with its verdict."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from typer import Option

from nano_coder.commands.options import Setup, agent_options
from nano_coder.models.opening import find_opener
from nano_coder.run.execution import is_reflection
from nano_rl.checkpoints.evaluate import component_means, row_of, table
from nano_rl.command_setup import all_tasks, chosen_reward, oracle_runtime, policy_runtime
from nano_rl.commands.eval import vars_of
from nano_rl.commands.options import EnvOption, RewardOption, Seed, Tasks
from nano_rl.commands.progress import LOGGED, bar, print_components, print_rows, tell_ungraded
from nano_rl.gather.rollouts import WORKERS, collect, execute, number_of_runs, oracle_policy
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.types import Split, Trajectory


@agent_options("model", "base_url", "device", "net", "log", "agent", "agent_folders")
def command(
    setup: Setup,
    tasks: Tasks = None,
    env: EnvOption = None,
    oracle: Annotated[
        bool, Option("--oracle", help="Run each task's own solution instead of a model.")
    ] = False,
    group_size: Annotated[int, Option(min=1, help="Runs of each task.")] = 1,
    temperature: Annotated[float, Option(min=0, max=100, help="Of the sampling.")] = 1.0,
    reflect: Annotated[
        int,
        Option(
            metavar="[N]", min=0, show_default=False,
            help="Of each run that fails, N second attempts (1) that read its diff and the check's output: a"
            " group.",
        ),
    ] = 0,
    reward: RewardOption = None,
    seed: Seed = 0,
    ray: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Run as actors of this Ray cluster; auto: one of this machine."),
    ] = None,
    rollout_workers: Annotated[int | None, Option(min=1, help="Actors of --ray.")] = None,
    as_json: JsonOption = False,
) -> int:  # fmt: skip
    """Run each task of a file, or of environments, GROUP_SIZE times, and log runs and verdicts."""
    if oracle and env:
        raise UsageError("--oracle: an environment has no solutions of its tasks; leave out one of the two")
    if oracle and reflect:
        raise UsageError("--reflect: oracles do not fail, so no attempt follows; leave out one of the two")
    if (ray or rollout_workers) and (oracle or reflect or not ray):
        raise UsageError("--ray ADDRESS places first attempts of a model: leave out --oracle and --reflect")
    config = setup.config
    environments, work = all_tasks(tasks, env, Split.TRAIN, seed)
    composed = chosen_reward(reward, work)
    with bar("rollouts", number_of_runs(work) * (1 if oracle else group_size), LOGGED) as progress:

        def done(run: Trajectory) -> None:
            if not is_reflection(run):
                progress.advance(str(run.stop))

        if oracle:
            runtime = oracle_runtime(config.log, config)
            policies = [oracle_policy(t, runtime.profile) for t in work]
            runs = execute(work, policies, runtime, on_run=done, reward=composed)
        else:
            runtime = policy_runtime(config, setup.sources, temperature=temperature, trains=True)
            runtime = replace(runtime, environments=environments)
            with ExitStack() as stack:
                gather: Any = partial(collect, reflect=reflect)
                if ray:
                    if runtime.settings.agent or not find_opener(config.model or ""):
                        raise UsageError(
                            "--ray runs nano's own agent on a hosted model: give --model openai:NAME"
                            " --base-url URL, which may be that of vLLM or nano-coder serve, and leave"
                            " --agent out"
                        )
                    tell = partial(print, file=sys.stderr)
                    workers = WORKERS.find("ray")(runtime, config, ray, rollout_workers, tell)
                    gather = stack.enter_context(closing(workers)).collect
                runs = gather(work, runtime, group_size=group_size, seed=seed, on_run=done, reward=composed)
    tell_ungraded(runs)
    first, second = ([run for run in runs if is_reflection(run) == again] for again in (False, True))
    rows = [*table(first), *([row_of("second attempts", second)] if second else [])]
    components = component_means(runs) if composed else {}
    report: dict[str, Any] = {"rows": [vars_of(row) for row in rows], "runs": [run.id for run in runs]}
    report |= {"components": components} if composed else {}

    def show() -> None:
        print_rows(rows)
        if composed:
            print_components(components)

    emit(report, as_json, show)
    return 0
