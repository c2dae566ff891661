"""Groups of logged runs: columns in memory, turns and tokens loaded when a step takes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nano_rl.learn.rows import Group, GroupMember, is_dead
from nano_rl.logs.admission import RunVerifier
from nano_shared import snapshot
from nano_shared.store import LogStore
from nano_shared.types import Task, Trajectory, Verdict


@dataclass(slots=True, kw_only=True)
class LoggedRuns:
    """Loads runs of the logs that a training reads."""

    stores: Sequence[LogStore]
    verifiers: Sequence[RunVerifier] | None = None
    """[logs] checks of the tokens of a run when it is loaded; None if all runs were verified before"""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """run -> the verdict to train on, if it is not the newest one in the log"""
    refused: Counter[str] = field(default_factory=Counter)
    """refusal -> number of loaded runs that were refused"""

    def run(self, member: GroupMember) -> Trajectory:
        """Load a run. Raises LogError if it cannot be read."""
        run = self.stores[member.log].get(member.id)
        verdict = self.verdicts.get(member.id)
        return run if verdict is None else run.model_copy(update={"verdict": verdict})

    def task(self, log: int, run: str) -> Task:
        """The task of a run; its snapshot is copied to the first log, to which fresh runs are written."""
        task = self.stores[log].task(run)
        if log and task.snapshot is not None:
            snapshot.copy(task.snapshot, self.stores[log].blobs, self.stores[0].blobs)
        return task

    def verified(self, member: GroupMember) -> Trajectory | None:
        """Load a run; None, and counted in `refused`, if its tokens do not match its texts and template.

        Log-probs are not recomputed, since the weights have changed since training began; the trainer
        compares them with its own at every step.
        """
        run = self.run(member)
        refusal = self.verifiers[member.log].verify(run, score=False).refusal if self.verifiers else None
        if refusal is None:
            return run
        self.refused[refusal.value] += 1
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """As `Group`, with runs that stay in their logs until `load`."""

    task_key: str
    """`Trajectory.group_key`"""
    forked: bool = False
    members: tuple[GroupMember, ...] = ()
    """[G]; empty if the task is only an environment for fresh rollouts"""
    runs: LoggedRuns
    example: tuple[int, str] | None = None
    """index of the log and id of a run with the task, if there are no members"""
    mutant: Task | None = None
    """the task, if it was made of a mutant: no run of it needs to be in a log"""

    @property
    def task(self) -> Task:
        return self.mutant or self.runs.task(*self._first)

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
        """The group restricted to these runs, in this order."""
        by_id = {member.id: member for member in self.members}
        return replace(self, members=tuple(by_id[run] for run in runs))

    def environment(self) -> LoggedGroup:
        """The task without its runs, as an environment for fresh rollouts."""
        return self if self.mutant else replace(self, members=(), example=self._first)

    @property
    def _first(self) -> tuple[int, str]:
        return self.example or (self.members[0].log, self.members[0].id)

    def load(self) -> Group | None:
        """Load the runs whose tokens are verified; None if there is none."""
        runs = [run for member in self.members if (run := self.runs.verified(member)) is not None]
        return Group(task_key=self.task_key, trajectories=tuple(runs)) if runs else None


class LoggedTasks(Sequence[Task]):
    """The task of each group, read from the log on access."""

    def __init__(self, groups: Sequence[Group | LoggedGroup]) -> None:
        self._groups = groups

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return LoggedTasks(self._groups[place])
        return self._groups[place].task


def members_of(groups: Collection[Group | LoggedGroup]) -> Mapping[str, Group | LoggedGroup]:
    """Run id -> its group."""
    return {member.id: group for group in groups for member in group.members}
