"""The logged runs that a training still has to learn from, by task, and what each step takes of them.

A run is taken as often as `uses` says, the youngest of its task first; one that has become older than the
bound on staleness is dropped, and so is one whose tokens turn out to be damaged when it is taken. What was
taken is part of the training's state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from nano_rl.learn.rows.group import Group, Member
from nano_rl.logs.logged_group import LoggedGroup


class ReplayBuffer:
    """Hands out logged runs so that every task comes once before any comes again."""

    def __init__(
        self,
        groups: Sequence[Group | LoggedGroup],
        *,
        uses: int | None,
        max_staleness: int | None,
        seed: int,
        born: Mapping[str, int] | None = None,
        learned_from: Collection[str] = (),
    ) -> None:
        """`born` is the version that sampled each run, where its turns do not say it on this policy's own
        line; `learned_from` are runs that the policy has learned from once before. `uses` None is any
        number."""
        self._groups = {group.task_key: group for group in groups}
        self._members = {key: group.members for key, group in self._groups.items()}
        self._limit, self._max_staleness, self._seed = uses, max_staleness, seed
        told = born or {}
        self.born = {m.id: told.get(m.id, m.version) for of in self._members.values() for m in of}
        """version of the policy that sampled each run"""
        self.damaged: set[str] = set()
        """runs that were to be taken, and had tokens that cannot be trained on"""
        self._uses = {run: 1 for run in self.born if run in learned_from}
        self._round = -1
        self._queue: list[str] = []

    def draw(self, count: int, most: int, version: int, *, even: bool = False) -> list[Group]:
        """Logged runs of at most `count` tasks, at most `most` of each, no task twice.

        `even` takes as many at a time as leave no small remainder, where nothing else joins the group.
        """
        drawn: list[Group] = []
        passed: list[str] = []
        while len(drawn) < count:
            if not self._queue and not self._next_round(version, passed, drawn):
                break
            key = self._queue.pop(0)
            if any(group.task_key == key for group in drawn):
                passed.append(key)
                continue
            runs = self._left_of(key, version)
            if runs:
                take = math.ceil(len(runs) / math.ceil(len(runs) / most)) if even else most
                group = self._loaded(key, [run.id for run in runs[:take]])
                drawn += [group] if group else []
        self._queue = [*passed, *self._queue]
        for group in drawn:
            for run in group.trajectories:
                self._uses[run.id] = self._uses.get(run.id, 0) + 1
        return drawn

    def left(self, version: int) -> int:
        """Runs that may still be taken at that version of the policy, each counted once."""
        return sum(self._may(run) and self._young(run, version) for run in self.born)

    def too_old(self, version: int) -> int:
        """Runs that were not taken as often as they might, and have become too old."""
        return sum(self._may(run) and not self._young(run, version) for run in self.born)

    def state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "queue": list(self._queue),
            "uses": dict(self._uses),
            "damaged": sorted(self.damaged),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()` over the same runs and seed."""
        self._round, self._queue = int(state["round"]), [str(key) for key in state["queue"]]
        self._uses = {str(run): int(count) for run, count in state["uses"].items()}
        self.damaged = set(state.get("damaged", ()))

    def _next_round(self, version: int, passed: Sequence[str], drawn: Sequence[Group]) -> bool:
        """Put the tasks that have runs left into a new order; False where all of them are drawn already."""
        done = {*passed, *(group.task_key for group in drawn)}
        keys = [key for key in self._groups if self._left_of(key, version)]
        if not set(keys) - done:
            return False
        self._round += 1
        Random(f"replay {self._seed} {self._round}").shuffle(keys)
        self._queue = keys
        return True

    def _loaded(self, key: str, runs: Sequence[str]) -> Group | None:
        """These runs whole, without those whose tokens are damaged; None where all of them are."""
        group = self._groups[key].only(runs).load()
        self.damaged |= set(runs) - {run.id for run in group.trajectories} if group else set(runs)
        return group

    def _left_of(self, key: str, version: int) -> list[Member]:
        runs = [m for m in self._members[key] if self._may(m.id) and self._young(m.id, version)]
        return sorted(runs, key=lambda m: (self._uses.get(m.id, 0), -self.born[m.id], -m.started, m.id))

    def _may(self, run: str) -> bool:
        used_up = self._limit is not None and self._uses.get(run, 0) >= self._limit
        return not used_up and run not in self.damaged

    def _young(self, run: str, version: int) -> bool:
        return self._max_staleness is None or version - self.born[run] <= self._max_staleness
