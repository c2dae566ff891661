"""Runs side by side over one policy: the body of rollouts, forks and tries."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from nano_coder.agent.loop import derived_seed
from nano_coder.run.execution import Runtime, Stop, grade_run, run_task
from nano_coder.run.execution import passed as passed  # also imported from here
from nano_shared.policy import Policy
from nano_shared.types import Task, Trajectory

AT_ONCE = 64
"""runs at a time, one thread each, of policies that decode elsewhere"""
_GRADERS = 8
"""number of runs that are graded at a time"""
OnRun = Callable[[Trajectory], object]
Episode = Callable[[Executor], Sequence[Future[Trajectory]]]
"""executes a run, and what follows from it; returns the futures of their grading, which the executor does"""


def run_side_by_side(
    episodes: Sequence[Episode], policy: Policy | None, *, at_once: int | None = None,
    on_run: OnRun | None = None, stop: Stop | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Execute episodes on threads, and return the graded runs of each in their order; `on_run` gets each.
    `policy` is the one that all share, and which this thread steps meanwhile if it is a local one. `at_once`
    None: as many as keep it busy. What is raised here, Ctrl-C too, sets `stop`, so that the others end."""
    most = min(at_once or getattr(policy, "agents_together", AT_ONCE), max(1, len(episodes)))
    agents_of, steps_here = getattr(policy, "agents", None), getattr(policy, "hosted", None)
    # one for each agent; policies without a scheduler need none
    slots: list[AbstractContextManager[object]]
    slots = list(agents_of(len(episodes), most)) if agents_of else [nullcontext() for _ in episodes]
    done: list[Trajectory] = []
    # grading has its own threads, so that it does not keep an agent's thread from the next agent
    with (
        ThreadPoolExecutor(_GRADERS) as graders,
        ThreadPoolExecutor(most) as agents,
        # with a local policy this thread decodes while it waits for a future
        steps_here() if steps_here else nullcontext(lambda future: None) as lead,
        ExitStack() as stack,
    ):

        def in_slot(episode: Episode, slot: AbstractContextManager[object]) -> Sequence[Future[Trajectory]]:
            with slot:
                return episode(graders)

        futures = [agents.submit(in_slot, *one) for one in zip(episodes, slots, strict=True)]

        def cancel_pending() -> None:
            for future, slot in zip(futures, slots, strict=True):
                if future.cancel():
                    with slot:
                        pass

        if stop is not None:
            stack.push(lambda kind, *_: stop.set() if kind else None)
        stack.callback(cancel_pending)
        for future in futures:
            lead(future)
            for graded in future.result():
                lead(graded)
                done.append(graded.result())
                if on_run:
                    on_run(done[-1])
    return done


def with_private_notes(runtime: Runtime) -> Runtime:
    """The notes that a run writes are seen by it alone."""
    if (notes := runtime.project.notes) is None:
        return runtime
    return replace(runtime, project=replace(runtime.project, notes=notes.for_forks()))


def member_seed(seed: int, task: Task, member: int) -> int:
    return derived_seed(seed, task.key, member)


def run_tries(
    task: Task, runtime: Runtime, count: int, stop: Stop, *, seed: int | None = None,
    on_end: Callable[[int, Trajectory], object] = lambda member, run: None,
) -> list[Trajectory]:  # fmt: skip
    """Run a task up to `count` times, until one passes its check, which ends the others as interrupted; so
    does `stop`, from any thread. Returns those that began, one group; those that were ended
    have no verdict.

    `on_end` is called in another thread with the index and the run, as each has been graded. Notes that a run
    writes are seen by it alone. Raises as `run_task` does.
    """
    base = secrets.randbits(32) if seed is None else seed
    runtime = with_private_notes(replace(runtime, hooks=replace(runtime.hooks, stop=stop)))

    def graded(member: int, run: Trajectory) -> Trajectory:
        run = grade_run(run, runtime)
        try:
            on_end(member, run)  # before the others end by it
        finally:
            if passed(run):
                stop.set()
        return run

    def one(member: int, graders: Executor) -> list[Future[Trajectory]]:
        if stop.is_set():
            return []
        with ExitStack() as failing:
            failing.callback(stop.set)  # every other run would meet it too
            run = run_task(task, runtime, seed=member_seed(base, task, member))
            failing.pop_all()
        return [graders.submit(graded, member, run)]

    return run_side_by_side([partial(one, member) for member in range(count)], runtime.policy)


def best_of(runs: Sequence[Trajectory]) -> Trajectory:
    """Of the runs that passed the one with the shortest diff; where none did, of the highest reward, rather
    one that changed something."""

    def rank(run: Trajectory) -> tuple[bool, float, bool, int]:
        reward = -1.0 if run.reward is None else run.reward
        return not passed(run), -reward, not (run.diff or passed(run)), len(run.diff)

    return min(runs, key=rank)
