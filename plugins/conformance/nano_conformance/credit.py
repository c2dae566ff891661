"""Checks of credit: advantages of groups, turns and tokens, and token weights, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random

from nano_conformance.adapter import Subject
from nano_conformance.by_hand import advantages_by_hand
from nano_conformance.case import Compared, ConformanceCheck, Run

Rewards = Sequence[float | None]
COMPARISONS = [("mean", s) for s in ("none", "sample", "population")]
COMPARISONS += [("rloo", s) for s in ("none", "sample", "population")] + [("none", "none")]
LARGE = 1e4
"""size of rewards at which the epsilon added to the deviation does not matter"""
RAGGED: dict[str, list[int]] = {"a": [5, 3], "b": [9], "c": [0], "d": [4, 0, 7]}
"""trained tokens in each row of four trajectories"""


def credit(draw: int = 0) -> Iterator[ConformanceCheck]:
    yield from _known_groups()
    for baseline, std in COMPARISONS:
        groups = _groups(Random(f"groups {draw} {baseline} {std}"))
        yield ConformanceCheck(
            criterion="AC-5", name=f"groups of any size, missing rewards: {baseline}, std {std}",
            run=[(f"rewards {_as_text(g)}", partial(_advantages, g, baseline, std)) for g in groups],
            tolerance=1e-5,
        )  # fmt: skip
    yield _drawn("AC-8", "turns: discounted returns against the group's", _turns, draw)
    yield _drawn("AC-16", "gae, term by term", _gae, draw)
    yield _drawn("AC-16", "whitened over sampled tokens", _whitened, draw)
    yield _drawn("AC-9", "what the tokens of a row weigh", _weights, draw)


def _drawn(
    criterion: str, name: str, make: Callable[[Random], Iterator[tuple[str, Run]]], draw: int
) -> ConformanceCheck:
    return ConformanceCheck(criterion=criterion, name=name, run=list(make(Random(f"{name} {draw}"))))


def _known_groups() -> Iterator[ConformanceCheck]:
    one, third, root = [1.0, 0.0, 0.0, 0.0], -1 / 3, math.sqrt(3)
    known: list[tuple[str, Rewards, str, str, list[float]]] = [
        ("AC-4", one, "mean", "none", [0.75, -0.25, -0.25, -0.25]),
        ("AC-4", one, "mean", "sample", [1.5, -0.5, -0.5, -0.5]),
        ("AC-4", one, "mean", "population", [root, -1 / root, -1 / root, -1 / root]),
        ("AC-4", one, "rloo", "none", [1, third, third, third]),
        ("AC-5", [1.0, 3.0, 2.0, None], "mean", "none", [-1, 1, 0, 0]),
        ("AC-3", [5.0], "mean", "none", [0.0]),
        ("AC-3", [None, 5.0, None], "rloo", "none", [0.0, 0.0, 0.0]),
        *(("AC-1", [0.95] * 8, baseline, std, [0.0] * 8) for baseline, std in COMPARISONS[:-1]),
    ]
    for criterion, rewards, baseline, std, expected in known:
        # an epsilon of up to 1e-4 may be added to the deviation
        yield ConformanceCheck(
            criterion=criterion, name=f"advantages of {_as_text(rewards)}: {baseline}, std {std}",
            run=partial(_known, rewards, baseline, std, expected),
            tolerance=1e-3 if std != "none" else 1e-9,
        )  # fmt: skip


def _known(
    rewards: Rewards, baseline: str, std: str, expected: Sequence[float], subject: Subject
) -> Compared:
    return expected, list(subject.function("advantages")(rewards, baseline=baseline, std=std))


def _groups(random: Random) -> list[Rewards]:
    """Groups of 1 to 9 rewards: a third, all but one, or all missing; few values, so some are equal."""
    groups: list[Rewards] = [[LARGE], [None, LARGE], [None] * 3, [None, LARGE, 0.0], [LARGE, LARGE, None]]
    for size in range(2, 10):
        values = [LARGE * random.choice((0.0, 1.0, random.uniform(-1, 1))) for _ in range(size)]
        groups += [values, [None if random.random() < 1 / 3 else v for v in values]]
        groups.append([*values, None, random.uniform(-LARGE, LARGE)])
    return groups


def _advantages(rewards: Rewards, baseline: str, std: str, subject: Subject) -> Compared:
    made = subject.function("advantages")(rewards, baseline=baseline, std=std)
    return advantages_by_hand(rewards, baseline, std), list(made)


def _turns(random: Random) -> Iterator[tuple[str, Run]]:
    for baseline in ("mean", "rloo", "none"):
        for discount in (1.0, 0.5, random.uniform(0.6, 0.95), 0.0):
            group: list[list[float] | None] = [
                [random.uniform(-1, 1) for _ in range(turns)] for turns in random.sample(range(1, 6), 4)
            ]
            group.insert(random.randrange(5), None)
            scored = [r for r in group if r]
            for of in (group, [scored[0], None], [None, *scored[:2]]):
                yield f"{baseline}, discount {discount:g}", partial(_turns_of, of, baseline, discount)


def _turns_of(
    group: Sequence[Sequence[float] | None], baseline: str, discount: float, subject: Subject
) -> Compared:
    made = subject.function("turn_advantages")(group, discount=discount, baseline=baseline)
    returns = [
        [sum(discount ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] if r else None
        for r in group
    ]
    means = {place: sum(r) / len(r) for place, r in enumerate(returns) if r}
    expected = []
    for place, of in enumerate(returns):
        others = [m for other, m in means.items() if baseline == "mean" or other != place]
        level = sum(others) / len(others) if others and baseline != "none" else 0.0
        alone = baseline != "none" and len(means) < 2
        expected += [0.0 if alone else value - level for value in of or ()]
    return expected, [a for of_turns in made for a in of_turns]


def _gae(random: Random) -> Iterator[tuple[str, Run]]:
    for discount in (1.0, random.uniform(0.8, 0.98)):
        for lam in (0.0, 1.0, random.uniform(0.3, 0.95)):
            length = random.randint(4, 9)
            rewards = [random.uniform(-1, 1) for _ in range(length)]
            values = [random.uniform(-1, 1) for _ in range(length)]
            yield f"discount {discount:g}, lambda {lam:g}", partial(_gae_of, rewards, values, discount, lam)


def _gae_of(
    rewards: list[float], values: list[float], discount: float, lam: float, subject: Subject
) -> Compared:
    made, returns = subject.function("gae")(rewards, values, discount=discount, lam=lam)
    following = [*values[1:], 0.0]
    surprise = [r + discount * v_next - v for r, v_next, v in zip(rewards, following, values, strict=True)]
    places = range(len(rewards))
    expected = [sum((discount * lam) ** (k - t) * surprise[k] for k in places[t:]) for t in places]
    return [*expected, *(a + v for a, v in zip(expected, values, strict=True))], [*made, *returns]


def _whitened(random: Random) -> Iterator[tuple[str, Run]]:
    for lengths in ([5, 4, 7], [6, 4], [4, 4]):
        rows = [[LARGE * random.uniform(-1, 2) for _ in range(n)] for n in lengths]
        masks = [[int(place != 1 and random.random() < 0.8) for place in range(n)] for n in lengths]
        masks[0][0] = masks[1][2] = 1
        yield f"rows of {lengths}", partial(_whitened_of, rows, masks)
    yield "equal ones", partial(_whitened_of, [[2.0] * 5, [2.0] * 4], [[1] * 5, [1, 0, 1, 1]])


def _whitened_of(rows: list[list[float]], masks: list[list[int]], subject: Subject) -> Compared:
    made = subject.function("whitened")(rows, masks)
    pairs = [(a, m) for row, mask in zip(rows, masks, strict=True) for a, m in zip(row, mask, strict=True)]
    sampled = [a for a, m in pairs if m]
    mean = sum(sampled) / len(sampled)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in sampled) / len(sampled))
    expected = [(a - mean) / deviation if m and deviation > 0 else 0.0 for a, m in pairs]
    return expected, [a for row in made for a in row]


def _weights(random: Random) -> Iterator[tuple[str, Run]]:
    rows = [(name, tokens) for name, of in RAGGED.items() for tokens in of]
    random.shuffle(rows)
    for aggregation in ("token", "sequence", "constant"):
        yield f"mean by {aggregation}", partial(_weights_of, rows, aggregation, random.randint(2, 40))


def _weights_of(rows: list[tuple[str, int]], aggregation: str, length: int, subject: Subject) -> Compared:
    names, tokens = [name for name, _ in rows], [count for _, count in rows]
    made = subject.function("weights")(names, tokens, aggregation=aggregation, constant_length=length)
    expected = []
    for name in names:
        own = sum(RAGGED[name])
        trajectories = len([of for of in RAGGED.values() if sum(of)])
        share = {"token": sum(tokens), "sequence": trajectories * own, "constant": trajectories * length}
        expected.append(1 / share[aggregation] if own else 0.0)
    return expected, list(made)


def _as_text(rewards: Rewards) -> str:
    return ", ".join("none" if r is None else f"{r:g}" for r in rewards)
