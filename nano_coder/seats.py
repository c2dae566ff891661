"""Seats: the agents that run at once on one policy, and what becomes of those that never begin."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nano_shared.policy import Policy

Seat = AbstractContextManager[object]


def seats_for(policy: Policy, count: int, at_once: int) -> list[Seat]:
    """[count] a seat for each agent; policies without local weights need none, and get empty ones."""
    agents = getattr(policy, "agents", None)
    return list(agents(count, at_once)) if agents else [nullcontext() for _ in range(count)]


def give_up(futures: Sequence[Future[Any]], seats: Sequence[Seat]) -> None:
    """Begin no more agents, and hold no seat for them; where all are done this does nothing."""
    for future, seat in zip(futures, seats, strict=True):
        if future.cancel():
            with seat:
                pass
