"""The order of a fixed set of rows: an endless sequence of seeded permutations, cut into steps."""

from __future__ import annotations

from random import Random


def step_indices(step: int, *, size: int, batch: int, seed: int) -> list[int]:
    """[batch] the rows of one step, of `size` rows: every epoch sees each once, in an order of its own.

    A function of its arguments alone, so that a resumed training goes on where it was.
    """
    wanted = range(step * batch, (step + 1) * batch)
    orders: dict[int, list[int]] = {}
    for epoch in {position // size for position in wanted}:
        orders[epoch] = list(range(size))
        Random(f"{seed} {epoch}").shuffle(orders[epoch])
    return [orders[position // size][position % size] for position in wanted]
