"""Text files of short lines, alone or in a tree of folders."""

from __future__ import annotations

import random
from collections.abc import Iterable

from nano_rl.domains.words import COLORS, WORDS

EXTENSIONS = ("txt", "log", "md", "csv", "tmp")
Files = dict[str, str]


def draw_lines(rng: random.Random, n: int) -> list[str]:
    """`word number color`, numbers distinct, so that sorting by them leaves nothing open."""
    numbers = rng.sample(range(10, 1000), n)
    return [f"{rng.choice(WORDS)} {number} {rng.choice(COLORS[:5])}" for number in numbers]


def text_of(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def tree(rng: random.Random) -> Files:
    """Files in a few folders: 7 to 12, some empty, some to throw away."""
    folders = rng.sample(WORDS, 3)
    names = rng.sample(WORDS, rng.randint(7, 12))
    return {
        f"{rng.choice(folders)}/{name}.{rng.choice(EXTENSIONS)}": text_of(
            draw_lines(rng, rng.choice((0, 2, 3, 4, 5, 6)))
        )
        for name in names
    }
