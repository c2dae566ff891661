"""Rollouts dealt over ranks: each decodes its share with its own copy of the weights; rank 0 gets the runs.

A group stays on one rank, which computes its prefix once. The shares depend on the number of ranks alone, so
that the same training on as many ranks makes the same runs, bit for bit under the lockstep scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from nano_cluster.ranks import Ranks
from nano_cluster.ray_setup import setup_of
from nano_cluster.ray_worker import WorkerSetup, open_runtime
from nano_coder.config import load_config
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import OnRun, collect
from nano_rl.rewards import Reward
from nano_shared.process import return_freed_memory
from nano_shared.types import Sampling, Task, Trajectory

ROLL_OUT, HAND_IN = "roll out", "hand in"
"""orders: to make the runs of a share, and to give them to rank 0 once all ranks have made theirs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutShare:
    """What one rank rolls out of a step."""

    setup: WorkerSetup
    tasks: Sequence[Task]
    sizes: Sequence[int]
    """[tasks] runs of each"""
    seed: int
    reflect: int
    sampling: Sampling
    version: int
    """of the policy"""

    def roll_out(self, runtime: Runtime, on_run: OnRun | None = None) -> list[Trajectory]:
        return collect(
            self.tasks, runtime, group_size=self.sizes, seed=self.seed, reflect=self.reflect, on_run=on_run
        )


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """[tasks] the rank of each, ascending, of tasks with so many runs each."""
    total = sum(sizes)
    return [int((end - size / 2) * ranks / total) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class LeadingRollouts:
    """Rank 0's part of the rollouts."""

    def __init__(self, ranks: Ranks, members: int) -> None:
        """`members`: how many ranks roll out."""
        self._ranks, self._members = ranks, members
        self._setup: WorkerSetup | None = None

    def collect(
        self, tasks: Sequence[Task], runtime: Runtime, *, group_size: int | Sequence[int] = 1, seed: int = 0,
        on_run: OnRun | None = None, reward: Reward | None = None, reflect: int = 0,
    ) -> list[Trajectory]:  # fmt: skip
        """As `nano_rl.gather.rollouts.collect`, on all members. Raises RolloutsFailed with what another rank
        failed with, and RankLost."""
        sizes = [group_size] * len(tasks) if isinstance(group_size, int) else group_size
        if not sum(sizes):
            return []
        self._setup = self._setup or setup_of(runtime, None, load_config({}, Path())[0])
        members = self._members
        if sessions := runtime.environments.sessions:  # that may be open at a time, of all ranks
            members = min(members, sessions)
            most = min(runtime.settings.at_once or sessions, sessions // members)
            runtime = replace(runtime, settings=replace(runtime.settings, at_once=most))
        dealt = deal(sizes, members)

        def share(rank: int) -> RolloutShare:
            taken = [place for place, its in enumerate(dealt) if its == rank]
            assert self._setup is not None
            return RolloutShare(
                setup=replace(self._setup, settings=runtime.settings), tasks=[tasks[at] for at in taken],
                sizes=[sizes[at] for at in taken], seed=seed, reflect=reflect, sampling=runtime.sampling,
                version=runtime.policy.version,
            )  # fmt: skip

        def heard(run: Trajectory) -> None:
            for rank in range(1, self._ranks.size):
                self._ranks.answered(rank)
            if on_run:
                on_run(run)

        with self._ranks.heeding_signals():
            self._ranks.order(ROLL_OUT)
            own = self._ranks.scatter([share(rank) for rank in range(self._ranks.size)])
            done = own.roll_out(runtime, heard)
            self._ranks.await_answers()
        self._ranks.order(HAND_IN)
        for run in (run for runs in (self._ranks.gather([]) or ()) for run in runs):
            done.append(run)
            if on_run:
                on_run(run)
        return reward.apply(done, runtime) if reward else done


class FollowingRollouts:
    """The part of another rank; `opened` holds its copy of the weights."""

    def __init__(self, ranks: Ranks, opened: OpenedWeights, config: TrainConfig) -> None:
        self._ranks, self._opened, self._config = ranks, opened, config
        self._runtime: Runtime | None = None
        self._runs: list[Trajectory] = []

    def follow(self, order: str) -> None:
        if order == HAND_IN:
            self._ranks.gather(self._runs)
            self._runs = []
            return
        share: RolloutShare = self._ranks.scatter()
        with self._ranks.answering():
            self._runs = self._roll_out(share) if share.tasks else []

    def _roll_out(self, share: RolloutShare) -> list[Trajectory]:
        policy = local_policy(
            self._opened.loaded, share.setup.profile, version=share.version, scheduler=self._config.scheduler
        )
        self._runtime = self._runtime or open_runtime(share.setup, lambda: policy)
        live = replace(self._runtime, policy=policy, sampling=share.sampling, settings=share.setup.settings)
        runs = share.roll_out(live)
        return_freed_memory()
        return runs
