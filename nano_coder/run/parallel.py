"""Agents that run at once on one policy: the slot that each of them holds, and those that never begin."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from nano_shared.policy import Policy

Slot = AbstractContextManager[object]


def slots_for(policy: Policy, count: int, at_once: int) -> list[Slot]:
    """[count] a slot for each agent; policies without local weights need none, and get empty ones."""
    agents = getattr(policy, "agents", None)
    return list(agents(count, at_once)) if agents else [nullcontext() for _ in range(count)]


def cancel_pending(futures: Sequence[Future[Any]], slots: Sequence[Slot]) -> None:
    """Begin no more agents, and hold no slot for them; where all are done this does nothing."""
    for future, slot in zip(futures, slots, strict=True):
        if future.cancel():
            with slot:
                pass
