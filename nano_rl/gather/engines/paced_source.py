"""Rollouts decoupled from training: further steps roll out in threads while one is learned from.

    bound 2    roll out 0   roll out 1 and 2 (v0) ...  roll out 3 (from v1)  ...
    trainer                 learn 0 -> v1   learn 1 -> v2   ...

Tasks are drawn here, in the order of the steps, and composed rewards are computed here. A rollout that
crosses an update goes on with the newer weights at its next turn; each turn carries its version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.engines.adapter_publisher import AdapterPublisher
from nano_rl.gather.engines.pacing import Pacing
from nano_rl.gather.engines.workers import Workers
from nano_rl.gather.overlapped_source import NOT_FROM_LOGS
from nano_rl.gather.rollouts import OnRun, collect
from nano_rl.gather.sources import Gathered, Gatherer, Sources, by_group
from nano_rl.learn.rows.group import Group
from nano_rl.rewards import Reward
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory

AT_ONCE = 2
"""steps that are rolled out at a time: the next begins while the last rollouts of one end"""


@dataclass(slots=True)
class AheadStep:
    """A step that is being rolled out, or waits to be."""

    tasks: tuple[Task, ...]
    runs: Future[list[Trajectory]] | None = None
    """None after a restart, until it is begun again"""


class PacedGatherer(Gatherer):
    """Gathers a step, with further ones under way; with `bound` 0 none is, as with Gatherer."""

    def __init__(
        self, sources: Sources, config: TrainConfig, reward: Reward | None,
        publisher: AdapterPublisher | None, *, bound: int, workers: Workers | None = None,
    ) -> None:  # fmt: skip
        """`bound`: versions between sampling and training of a token. Without a `publisher` rollouts sample
        from the weights in this process; without `workers` they run here. Raises UsageError for logs with a
        bound above 0."""
        if bound and sources.from_logs:
            raise UsageError(NOT_FROM_LOGS)
        super().__init__(sources, config, reward, workers.collect if workers else collect)
        self._publisher, self._workers = publisher, workers
        self._replaced = 0
        self._pacing = Pacing(bound=bound, steps=config.steps)
        self._ahead: dict[int, AheadStep] = {}
        self._threads = ThreadPoolExecutor(min(bound + 1, AT_ONCE), thread_name_prefix="step")
        self._waited = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give up what is rolled out ahead."""
        if self._workers:
            self._workers.close()
        if self._publisher:
            self._publisher.close()
        self._threads.shutdown(cancel_futures=True)

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> Gathered:
        """The groups of one step; the rollouts of the next ones may be running when this returns.

        Raises PolicyError if no server serves the weights, and what the rollouts of the step raised.
        """
        began = time.monotonic()
        live = self._publisher.follow(runtime, version) if self._publisher else runtime
        synced = time.monotonic() - began
        if not self._sources.from_logs:
            for ahead in self._pacing.advance(step):
                self._begin(ahead, live)
        self._waited = 0.0
        gathered = super().gather(live, step, version, on_run)
        values = staleness(gathered.groups, version)
        values |= {"steps_ahead": float(len(self._ahead)), "seconds_waited": self._waited}
        if self._publisher:
            values |= self._publisher.pool.metrics() | {"seconds_sync": synced}
        before = self._replaced
        if self._workers:
            values |= self._workers.metrics()
            self._replaced = self._workers.replaced
        return replace(
            gathered, off_policy_steps=int(values["staleness_max"]), worker_metrics=values,
            restarts=self._replaced - before,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The state of a gatherer, and the tasks of the steps that are under way."""
        ahead = {str(step): [task.key for task in one.tasks] for step, one in self._ahead.items()}
        return {**super().state(), "ahead": ahead}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`: the steps that were under way are rolled out again."""
        super().restore(state)
        by_key = {task.key: task for task in self._sources.tasks}
        self._ahead = {
            int(step): AheadStep(tasks=tuple(by_key[key] for key in keys))
            for step, keys in state["ahead"].items()
        }

    def _begin(self, step: int, live: Runtime) -> None:
        if step not in self._ahead:  # those of a saved state are drawn
            tasks = self._draw(step, self._config.prompts_per_step, taken=())
            self._ahead[step] = AheadStep(tasks=tuple(tasks))
        ahead = self._ahead[step]
        ahead.runs = self._threads.submit(
            self._roll_out, ahead.tasks, live, group_size=self._config.group_size, seed=self.seed(step)
        )

    def _first(self, step: int) -> list[Task]:
        return list(self._ahead[step].tasks)

    def _roll_each(
        self, tasks: Sequence[Task], missing: Mapping[str, int], runtime: Runtime, step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:  # fmt: skip
        """The rollouts that are under way; for a refill further ones, with the newest weights."""
        ahead = self._ahead.pop(step, None)
        if ahead is None:
            return super()._roll_each(tasks, missing, runtime, step, on_run)
        assert ahead.runs is not None
        began = time.monotonic()
        runs = ahead.runs.result()
        self._waited += time.monotonic() - began
        for run in runs if on_run else ():
            on_run(run)
        if self._reward:
            runs = self._reward.apply(runs, runtime)
        return by_group(tasks, runs)


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """`staleness_mean` and `staleness_max`, versions between sampling and training of a sampled token, and
    `stale_tokens`, those sampled by older versions."""
    ages = [
        (version - turn.completion.policy_version, len(turn.completion.tokens.sampled_ids))
        for group in groups
        for run in group.trajectories
        for turn in run.own_turns
        if turn.completion.tokens
    ]
    tokens = sum(count for _, count in ages)
    return {
        "staleness_mean": sum(age * count for age, count in ages) / max(1, tokens),
        "staleness_max": float(max((age for age, _ in ages), default=0)),
        "stale_tokens": float(sum(count for age, count in ages if age)),
    }
