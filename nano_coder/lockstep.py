"""Lockstep: which rows are decoded together depends on what they say, never on when it is said."""

from __future__ import annotations

from nano_coder.scheduler import Call, Scheduler


class Lockstep(Scheduler):
    """Rounds of all seated agents, in the order of their seats. Thread-safe.

    A round begins when the last one is decoded and every agent waits for a completion, or has left; its
    rows then join and leave the batch as their tokens decide. An agent is answered when its row ends and
    runs its tools at once; what it asks next waits for the next round. Where more agents are seated than run
    at once, the round is of those that come first; the seat of one that left falls to the next.

    Threads without a seat are served between rounds, each alone.
    """

    def _joinable(self) -> list[Call]:
        if self._live:
            return []
        for call in self._waiting:
            if call.seat is None:
                return [call]
        running = sorted(self._seats)[: self._at_once]
        calls = {call.seat: call for call in self._waiting}
        if any(seat not in calls for seat in running):
            return []
        return [calls[seat] for seat in running]
