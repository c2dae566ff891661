"""The runs of a task as they lie in logs: columns in memory, turns and tokens when a step takes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nano_rl.learn.rows.group import Group, Member, is_dead
from nano_rl.logs.token_verification import SecondLook
from nano_shared import snapshot
from nano_shared.store import LogStore
from nano_shared.types import Task, Trajectory, Verdict


@dataclass(slots=True, kw_only=True)
class Shelf:
    """The logs that a training reads, and what it knows of their runs."""

    stores: Sequence[LogStore]
    looks: Sequence[SecondLook] | None = None
    """of each log, to be taken at the tokens of a run when it is fetched; None where that has been done"""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """run -> the verdict that it is trained on, where that is not its newest in the log"""
    refused: Counter[str] = field(default_factory=Counter)
    """what was wrong with the tokens of runs that were fetched"""

    def run(self, member: Member) -> Trajectory:
        """A run whole. Raises LogError where it cannot be read."""
        run = self.stores[member.log].get(member.id)
        verdict = self.verdicts.get(member.id)
        return run if verdict is None else run.model_copy(update={"verdict": verdict})

    def task(self, log: int, run: str) -> Task:
        """The task of a run, its starting files in the first log, where fresh runs of it are written."""
        task = self.stores[log].task(run)
        if log and task.snapshot is not None:
            snapshot.copy(task.snapshot, self.stores[log].blobs, self.stores[0].blobs)
        return task

    def sound(self, member: Member) -> Trajectory | None:
        """A run whole; None, and counted, where its tokens are not what its texts and its template say.

        The weights have moved on since the training began, so that log-probs are not recomputed here: the
        trainer holds them against its own at every step.
        """
        run = self.run(member)
        seen = self.looks[member.log].see(run, score=False).refusal if self.looks else None
        if seen is None:
            return run
        self.refused[seen.value] += 1
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """As `Group`, of runs that stay in their logs until `load`."""

    task_key: str
    """`Trajectory.group_key`"""
    forked: bool
    members: tuple[Member, ...]
    """[G]; none where the task is an environment for fresh rollouts alone"""
    shelf: Shelf
    example: tuple[int, str] | None = None
    """place of the log and id of a run that holds the task, where there are no members"""

    @property
    def task(self) -> Task:
        return self.shelf.task(*self._first)

    @property
    def rewards_G(self) -> tuple[float, ...]:
        """[G], as `Group.rewards_G`"""
        return tuple(member.reward for member in self.members)

    @property
    def singleton(self) -> bool:
        return sum(not math.isnan(reward) for reward in self.rewards_G) < 2

    @property
    def dead(self) -> bool:
        return is_dead(self.rewards_G)

    def only(self, runs: Sequence[str]) -> LoggedGroup:
        """The group with these of its runs alone, in that order."""
        by_id = {member.id: member for member in self.members}
        return replace(self, members=tuple(by_id[run] for run in runs))

    def bare(self) -> LoggedGroup:
        """The task alone, as an environment for fresh rollouts."""
        return replace(self, members=(), example=self._first)

    @property
    def _first(self) -> tuple[int, str]:
        return self.example or (self.members[0].log, self.members[0].id)

    def load(self) -> Group | None:
        """The runs that are sound; None where none is."""
        runs = [run for member in self.members if (run := self.shelf.sound(member)) is not None]
        return Group(task_key=self.task_key, trajectories=tuple(runs)) if runs else None


class LoggedTasks(Sequence[Task]):
    """The task of each group, read from the log when it is asked for."""

    def __init__(self, groups: Sequence[Group | LoggedGroup]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return LoggedTasks(self._groups[place])
        return self._groups[place].task


def members_of(groups: Collection[Group | LoggedGroup]) -> Mapping[str, Group | LoggedGroup]:
    """Run -> its group."""
    return {member.id: group for group in groups for member in group.members}
