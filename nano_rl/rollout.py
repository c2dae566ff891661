"""Fresh rollouts: many executions through nano-coder's own runtime, in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

from nano_coder.runtime import Runtime, grade_run, run_task
from nano_rl.rewards import Reward
from nano_shared.hashing import content_hash
from nano_shared.policy import Policy
from nano_shared.types import Task, Trajectory

OnRun = Callable[[Trajectory], None]

CONCURRENCY = 32
"""agents at once; with a local policy, also the batch that it decodes"""


def collect(
    tasks: Sequence[Task],
    runtime: Runtime,
    *,
    group_size: int = 1,
    seed: int = 0,
    concurrency: int = CONCURRENCY,
    on_run: OnRun | None = None,
    reward: Reward | None = None,
) -> list[Trajectory]:
    """Run each task `group_size` times and grade each run: [tasks * group_size] in task order, logged.
    With a `reward`, its composed verdicts are logged beside the grader's, and are those returned.

    A wave of `concurrency` agents runs turn by turn together, so what is in a batch depends on the seed
    alone, and the same seed gives the same trajectories.
    """
    jobs = [(task, member) for task in tasks for member in range(group_size)]
    done: list[Trajectory] = []
    for start in range(0, len(jobs), concurrency):
        wave = jobs[start : start + concurrency]
        seats = [_seat(runtime.policy, index) for index in range(len(wave))]
        with ThreadPoolExecutor(len(wave)) as pool:
            futures = [
                pool.submit(_episode, task, episode_seed(seed, task, member), runtime, seat)
                for (task, member), seat in zip(wave, seats, strict=True)
            ]
            for future in futures:
                done.append(future.result())
                if on_run:
                    on_run(done[-1])
    return reward.apply(done, runtime) if reward else done


def execute(
    tasks: Sequence[Task],
    policies: Sequence[Policy],
    runtime: Runtime,
    *,
    on_run: OnRun | None = None,
    reward: Reward | None = None,
) -> list[Trajectory]:
    """Run each task once under a policy of its own (the oracles of a warm start), two at a time."""
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(_episode, task, None, replace(runtime, policy=policy), nullcontext())
            for task, policy in zip(tasks, policies, strict=True)
        ]
        done = []
        for future in futures:
            done.append(future.result())
            if on_run:
                on_run(done[-1])
    return reward.apply(done, runtime) if reward else done


def episode_seed(seed: int, task: Task, member: int) -> int:
    """The seed of one rollout: a function of the run's seed, the task and the place in the group."""
    return int(content_hash([seed, task.key, member]).removeprefix("sha256:")[:15], 16)


def _seat(policy: Policy, index: int):  # type: ignore[no-untyped-def]
    agent = getattr(policy, "agent", None)  # policies without local weights need no seat
    return agent(index) if agent else nullcontext()


def _episode(task: Task, seed: int | None, runtime: Runtime, seat) -> Trajectory:  # type: ignore[no-untyped-def]
    with seat:
        trajectory = run_task(task, runtime, seed=seed)
    return grade_run(trajectory, runtime)
