"""The replay buffer: the logged runs of a training by task, from which each step takes some.

A run is taken at most `uses` times, the newest runs of a task first; runs that are too old, or whose tokens
turn out to be damaged, are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from nano_rl.learn.rows import Group, GroupMember
from nano_rl.logs.reader import LoggedGroup


class ReplayBuffer:
    def __init__(
        self,
        groups: Sequence[Group | LoggedGroup],
        *,
        uses: int | None,
        max_staleness: int | None,
        seed: int,
        policy_versions: Mapping[str, int] | None = None,
        learned_from: Collection[str] = (),
    ) -> None:
        """`policy_versions` maps runs to the policy version that sampled them; without one that of the oldest
        turn counts. `learned_from` are runs that have been used once already. `uses` None: no limit."""
        self._groups = {group.task_key: group for group in groups}
        self._members = {key: group.members for key, group in self._groups.items()}
        self._limit, self._max_staleness, self._seed = uses, max_staleness, seed
        given = policy_versions or {}
        self.policy_versions = {
            m.id: given.get(m.id, m.version) for members in self._members.values() for m in members
        }
        """run -> version of the policy that sampled it"""
        self.damaged: set[str] = set()
        """runs that were drawn and cannot be trained on, because of their tokens"""
        self._uses = {run: 1 for run in self.policy_versions if run in learned_from}
        self._round = -1
        self._queue: list[str] = []

    def draw(self, count: int, most: int, version: int, *, even: bool = False) -> list[Group]:
        """Groups of at most `most` logged runs, of at most `count` different tasks; `even` splits the runs of
        a task into chunks of nearly equal size and takes one."""
        drawn: list[Group] = []
        passed: list[str] = []
        while len(drawn) < count:
            if not self._queue and not self._next_round(version, passed, drawn):
                break
            key = self._queue.pop(0)
            if any(group.task_key == key for group in drawn):
                passed.append(key)
                continue
            runs = self._available(key, version)
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
        """Number of runs that may still be taken at that version of the policy."""
        return sum(self._unused(run) and self._recent(run, version) for run in self.policy_versions)

    def too_old(self, version: int) -> int:
        """Number of runs that could still be taken if they were not too old."""
        return sum(self._unused(run) and not self._recent(run, version) for run in self.policy_versions)

    def state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "queue": list(self._queue),
            "uses": dict(self._uses),
            "damaged": sorted(self.damaged),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._round, self._queue = int(state["round"]), [str(key) for key in state["queue"]]
        self._uses = {str(run): int(count) for run, count in state["uses"].items()}
        self.damaged = set(state.get("damaged", ()))

    def _next_round(self, version: int, passed: Sequence[str], drawn: Sequence[Group]) -> bool:
        """Queue all tasks with runs left in a new order; False if each of them has been drawn already."""
        done = {*passed, *(group.task_key for group in drawn)}
        keys = [key for key in self._groups if self._available(key, version)]
        if not set(keys) - done:
            return False
        self._round += 1
        Random(f"replay {self._seed} {self._round}").shuffle(keys)
        self._queue = keys
        return True

    def _loaded(self, key: str, runs: Sequence[str]) -> Group | None:
        """The runs loaded with their tokens, without damaged ones; None if all are damaged."""
        group = self._groups[key].only(runs).load()
        self.damaged |= set(runs) - {run.id for run in group.trajectories} if group else set(runs)
        return group

    def _available(self, key: str, version: int) -> list[GroupMember]:
        """The runs of a task that may be taken: least used first, then newest first."""
        runs = [m for m in self._members[key] if self._unused(m.id) and self._recent(m.id, version)]
        return sorted(
            runs, key=lambda m: (self._uses.get(m.id, 0), -self.policy_versions[m.id], -m.started, m.id)
        )

    def _unused(self, run: str) -> bool:
        used_up = self._limit is not None and self._uses.get(run, 0) >= self._limit
        return not used_up and run not in self.damaged

    def _recent(self, run: str, version: int) -> bool:
        return self._max_staleness is None or version - self.policy_versions[run] <= self._max_staleness


class TaskBackoff:
    """Exponential backoff of logged tasks: a task whose group had no signal is left out for 1 step, then for
    2, 4, 8 and at most 16, until a group of it has a signal."""

    def __init__(self) -> None:
        self._step = 0
        self._streak: dict[str, int] = {}
        """task -> number of its latest groups in a row without a signal"""
        self._until: dict[str, int] = {}
        """task -> step from which it may be drawn again"""
        self._passed: set[str] = set()
        """tasks whose latest rollouts all earned the full reward"""
        self.any_signal = False
        """True once any group had a signal"""

    @property
    def resting(self) -> set[str]:
        return {key for key, until in self._until.items() if until > self._step}

    def solved(self, keys: Collection[str]) -> int:
        return len(self._passed & set(keys))

    def exhausted(self, keys: Collection[str]) -> bool:
        """True if every task is solved or had no signal in its latest two groups."""
        return all(key in self._passed or self._streak.get(key, 0) > 1 for key in keys)

    def record(self, live: Mapping[str, bool], passed: Collection[str]) -> None:
        """Record a step: whether the group of each task had a signal, and the tasks solved in all
        rollouts."""
        self._step += 1
        for key, has_signal in live.items():
            self._streak[key] = 0 if has_signal else self._streak.get(key, 0) + 1
            self._until[key] = self._step + (1 << min(self._streak[key], 5)) // 2
            self.any_signal |= has_signal
        self._passed = (self._passed - set(live)) | set(passed)

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "streak": dict(self._streak), "until": dict(self._until),
                "passed": sorted(self._passed), "signal": self.any_signal}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step, self.any_signal = state["step"], state["signal"]
        self._streak, self._until = dict(state["streak"]), dict(state["until"])
        self._passed = set(state["passed"])
