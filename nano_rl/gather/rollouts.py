"""Fresh rollouts: many executions through nano-coder's own runtime, decoded together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from nano_coder.run.execution import Runtime, grade_run, reflect_run, run_task
from nano_coder.run.parallel import cancel_pending, slots_for
from nano_coder.run.reflection import second_chance
from nano_rl.rewards import Reward
from nano_rl.tasks.pytest_plugins import runtime_for
from nano_shared.errors import NanoError, PolicyError, SandboxError
from nano_shared.hashing import content_hash
from nano_shared.policy import Policy
from nano_shared.types import StopReason, Task, Trajectory

OnRun = Callable[[Trajectory], None]

CONCURRENCY = 64
"""agents at once, a thread each; with a local policy, also the rows that are decoded together"""
_SILENT = "nothing_judged"
"""failure kind of a composed reward to which no part had anything to say"""
_GRADERS = 8
"""runs graded at once"""


def collect(
    tasks: Sequence[Task],
    runtime: Runtime,
    *,
    group_size: int | Sequence[int] = 1,
    seed: int = 0,
    concurrency: int = CONCURRENCY,
    on_run: OnRun | None = None,
    reward: Reward | None = None,
    reflect: int = 0,
) -> list[Trajectory]:
    """Run each task `group_size` times (one number, or one for each task) and grade each run: [runs] in task
    order, logged. With a `reward`, its composed verdicts are logged beside the grader's, and are those
    returned.

    With `reflect`, a run that failed is followed by so many second attempts, which each read its diff and
    what the check said: forks of its last step, and so a group that can be trained on. They are returned
    behind it.

    All agents run, `concurrency` at a time: one that ends makes room for the next, one that waits for its
    tools holds up nobody's decoding, and grading goes on beside both. Under a policy's lockstep scheduler
    what is in a batch depends on the seed alone, and the same seed gives the same trajectories.
    """
    sizes = [group_size] * len(tasks) if isinstance(group_size, int) else group_size
    jobs = [(task, member) for task, size in zip(tasks, sizes, strict=True) for member in range(size)]
    if not jobs:
        return []
    at_once = min(concurrency, len(jobs))
    slots = slots_for(runtime.policy, len(jobs), at_once)
    done: list[Trajectory] = []
    # grading has threads of its own: an agent's thread is needed for the next agent
    with (
        ThreadPoolExecutor(_GRADERS) as graders,
        ThreadPoolExecutor(at_once) as agents,
        _hosted(runtime.policy) as lead,
        ExitStack() as stack,
    ):
        futures: list[Future[list[Future[Trajectory]]]] = [
            agents.submit(
                _episode,
                task,
                episode_seed(seed, task, member),
                runtime_for(task, runtime),
                slot,
                graders,
                reflect,
            )
            for (task, member), slot in zip(jobs, slots, strict=True)
        ]
        stack.callback(cancel_pending, futures, slots)
        for future in futures:
            lead(future)
            for graded in future.result():
                lead(graded)
                done.append(graded.result())
                if on_run:
                    on_run(done[-1])
    return reward.apply(done, runtime) if reward else done


def failed(run: Trajectory) -> bool:
    """Whether a policy's backend, the sandbox or a judge failed: nobody can say what the run earned."""
    if run.stop in (StopReason.POLICY_ERROR, StopReason.SANDBOX_ERROR):
        return True
    verdict = run.verdict
    return verdict is not None and verdict.reward is None and verdict.failure_kind not in (None, _SILENT)


def none_graded(runs: Sequence[Trajectory]) -> NanoError:
    """The error that says why none of the runs has a reward, by the first."""
    first = runs[0]
    kind = (first.verdict.failure_kind if first.verdict else None) or ""
    of_sandbox = first.stop is StopReason.SANDBOX_ERROR or kind.startswith("sandbox")
    return (SandboxError if of_sandbox else PolicyError)(
        f"none of {len(runs)} runs could be graded; the first, {why_ungraded(first)}"
    )


def why_ungraded(run: Trajectory) -> str:
    why = run.stop_detail or (run.verdict.failure_kind if run.verdict else None) or "it has no check"
    return f"run {run.id}: {run.stop if run.stop and run.stop.ours else 'not graded'}: {why}"


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
            pool.submit(_run_and_grade, task, replace(runtime_for(task, runtime), policy=policy))
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
    return _seed_of([seed, task.key, member])


def _hosted(policy: Policy) -> AbstractContextManager[Callable[[Future[Any]], object]]:
    """What waits for an agent: with local weights this thread decodes meanwhile."""
    hosted = getattr(policy, "hosted", None)
    return hosted() if hosted else nullcontext(lambda future: None)


def _episode(
    task: Task,
    seed: int | None,
    runtime: Runtime,
    slot: AbstractContextManager[object],
    graders: ThreadPoolExecutor,
    reflect: int,
) -> list[Future[Trajectory]]:
    """A run, and its second attempts where it failed; each is being graded or is graded."""
    with slot:
        graded = [graders.submit(grade_run, run_task(task, runtime, seed=seed), runtime)]
        if reflect and second_chance(first := graded[0].result()):
            graded += [
                graders.submit(grade_run, attempt, runtime)
                for attempt in _second_attempts(first, runtime, seed, reflect)
            ]
    return graded


def _second_attempts(
    failed: Trajectory, runtime: Runtime, seed: int | None, count: int
) -> Iterator[Trajectory]:
    try:
        for member in range(count):
            yield reflect_run(failed, runtime, seed=reflection_seed(seed, member))
    except SandboxError:  # the check cannot be run again: the attempts so far stand, as in `attempt_task`
        return


def reflection_seed(seed: int | None, member: int) -> int | None:
    """The seed of a second attempt: a function of the first one's and of its place among them."""
    return None if seed is None else _seed_of([seed, "second", member])


def _seed_of(parts: list[int | str]) -> int:
    return int(content_hash(parts).removeprefix("sha256:")[:15], 16)


def _run_and_grade(task: Task, runtime: Runtime) -> Trajectory:
    return grade_run(run_task(task, runtime), runtime)
