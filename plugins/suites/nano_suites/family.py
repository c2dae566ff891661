"""Families of tasks: generators of tasks with one structure, each entirely in one split; and word lists.

The views of most suites are lists of families. A task is checked by a submitted answer (`answered`) or by the
final state of its files (`left`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from nano_rl.tasks.suite import Made, View
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks, StateCheck, StateChecks
from nano_shared.types import Limits, OracleAction, Split

_NAMES = """
Ada Alan Amir Anna Arjun Bela Bruno Carla Chen Clara Dana David Diego Elena Emil Esra Fatima Felix Finn Grace
Hana Hugo Ida Igor Ines Ivan Jana Jonas Julia Kai Karim Kofi Lars Lena Leo Lin Luca Maja Marco Maria Milan
Mina Nadia Nils Nina Noor Olga Omar Oskar Paula Petra Priya Rosa Ruth Samir Sara Selma Sofia Sven Tara Tomas
Uma Vera Viktor Wanda Yara Yusuf Zoe
"""
NAMES = tuple(_NAMES.split())
_SURNAMES = """
Adler Baker Berger Costa Dahl Diaz Egger Farah Fischer Garcia Haddad Hansen Ito Jensen Kaya Keller Kovacs
Lang Lopez Meyer Moreau Nagy Novak Okafor Olsen Park Patel Quinn Ricci Rossi Sato Schmid Silva Tanaka Vogel
Weber Yilmaz Zeman
"""
SURNAMES = tuple(_SURNAMES.split())
_WORDS = """
amber anchor apple arrow autumn basket beacon birch blanket bottle branch bridge bronze bucket butter cabin
candle canvas carpet castle cedar chalk cherry circle clover copper coral cotton crystal daisy desert diamond
ember engine fabric falcon feather fennel fern flame flower forest fossil garden ginger glacier grain granite
hammer harbor hazel helmet honey island ivory jacket jasmine jungle kettle ladder lantern laurel leather lemon
lilac linen magnet maple marble meadow mirror mortar needle nettle oasis olive orchard oyster paddle paper
pebble pepper pigeon pillow planet pocket quartz rabbit raven ribbon river rocket saddle saffron sail salmon
shadow silver spruce summit sunset tablet thistle thunder timber tulip tunnel velvet violet walnut willow
window winter yarrow zephyr
"""
WORDS = tuple(_WORDS.split())
_CITIES = """
Athens Basel Bergen Bilbao Bogota Cairo Cork Dakar Delhi Dresden Florence Geneva Ghent Graz Hanoi Izmir Kyoto
Lagos Leeds Lima Lisbon Lyon Malmo Nantes Naples Osaka Oslo Porto Quito Riga Seoul Sofia Tallinn Tunis Turin
Utrecht Vienna Vilnius Zagreb Zurich
"""
CITIES = tuple(_CITIES.split())
TEAMS = ("design", "finance", "legal", "marketing", "operations", "research", "sales", "support")
COLORS = ("black", "blue", "brown", "green", "grey", "orange", "purple", "red", "white", "yellow")


def person(rng: random.Random) -> str:
    """First name and surname."""
    return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"


def people(rng: random.Random, n: int) -> list[str]:
    """`n` people no two of whom share a first name."""
    return [f"{name} {rng.choice(SURNAMES)}" for name in rng.sample(NAMES, n)]


def day(rng: random.Random) -> str:
    """A day as YYYY-MM-DD."""
    return f"{rng.randint(2027, 2035)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def hour(rng: random.Random) -> str:
    """A time of the working day as HH:MM."""
    return f"{rng.randint(8, 17):02d}:{rng.choice(('00', '15', '30', '45'))}"


TEST_SHARE = 5
"""one in this many families of a view is in the test split, at least one"""
LIMITS = Limits(max_turns=12, max_tokens=1536)
SHORTEST = Limits(max_turns=2, max_tokens=160)
"""of the shortest form of a suite, for policies of a million parameters: one look, and the answer"""
THINGS = ("boat", "bridge", "castle", "desk", "door", "farm", "gate", "lamp", "mill", "tower")
"""what the shortest forms ask about: one family each"""
FEW = WORDS[::7]
"""the names in them"""


@dataclass(frozen=True, slots=True)
class Family:
    """A generator of tasks that share a structure and differ in names and numbers."""

    name: str
    draw: Callable[[random.Random], Made]


def view(
    domain: str,
    name: str,
    level: int,
    tools: Sequence[str],
    families: Iterable[Family],
    limits: Limits = LIMITS,
    extra: bool = False,
) -> View:
    """A view that draws from the families of the split; an `extra` one is made only by its name."""
    by_split = split_families(tuple(families), f"{domain}:{name}")

    def make(rng: random.Random, split: Split, level: int) -> Made:
        family = rng.choice(by_split[split])
        drawn = family.draw(rng)
        shown = [[one.prompt, one.files] for one in (drawn, *drawn.earlier)]
        program = content_hash(shown if drawn.earlier else shown[0])

        def made(one: Made) -> Made:
            return replace(
                one, program=(f"{domain}:{name}:{family.name}", program), tools=tuple(tools),
                limits=limits, earlier=tuple(map(made, one.earlier)),
            )  # fmt: skip

        return made(drawn)

    return View(name, level, make, extra)


def split_families(families: Sequence[Family], salt: str) -> dict[Split, tuple[Family, ...]]:
    """The families of each split, by a hash of their names, independent of their order. Raises ValueError for
    fewer than two, or for two of one name: then the splits could not differ."""
    if len({family.name for family in families}) != len(families) or len(families) < 2:
        raise ValueError(f"{salt}: needs two families or more, of distinct names")
    ranked = sorted(families, key=lambda f: hashlib.sha256(f"{salt}:{f.name}".encode()).digest())
    held_out = max(1, len(ranked) // TEST_SHARE)
    return {Split.TEST: tuple(ranked[:held_out]), Split.TRAIN: tuple(ranked[held_out:])}


def act(tool: str, /, **arguments: JsonValue) -> OracleAction:
    """One action of an oracle."""
    return OracleAction(name=tool, arguments=arguments)


Draw = Callable[[random.Random, Any], Any]


def draw_gaps(draws: Iterable[Draw], rng: random.Random, given: Any) -> dict[str, Any]:
    """The values of `{x}` and `{y}`; a draw that gives a tuple gives both."""
    values: list[Any] = []
    for draw in draws:
        value = draw(rng, given)
        values += value if isinstance(value, tuple) else [value]
    return dict(zip("xy", values, strict=False))


def filled(text: str, gaps: Mapping[str, object]) -> str:
    """The text with the values in its {gaps}, and their literals in those with !r; other braces stay."""
    for key, value in gaps.items():
        text = text.replace(f"{{{key}}}", str(value)).replace(f"{{{key}!r}}", repr(value))
    return text


def said(words: str, code: str, *draws: Draw) -> Callable[[random.Random, Any], tuple[str, str]]:
    """Words and code about what is given, with the same drawn values in both."""

    def fill(rng: random.Random, given: Any) -> tuple[str, str]:
        gaps = draw_gaps(draws, rng, given)
        return filled(words, gaps), filled(code, gaps)

    return fill


def answered(
    prompt: str,
    files: Mapping[str, str],
    answer: JsonValue,
    *actions: OracleAction,
    again: str | None = None,
    earlier: tuple[Made, ...] = (),
) -> Made:
    """A task whose answer is submitted; the oracle submits `again`, by default `str(answer)`."""
    return Made(
        prompt=prompt, files=dict(files), hidden=AnswerChecks(answer=answer),
        oracle=(*actions, act("submit", answer=str(answer) if again is None else again)), earlier=earlier,
    )  # fmt: skip


def left(prompt: str, files: Mapping[str, str], checks: Sequence[StateCheck], *actions: OracleAction) -> Made:
    """A task whose final state is checked, file by file."""
    return Made(
        prompt=prompt, files=dict(files), hidden=StateChecks(state=tuple(checks)),
        oracle=(*actions, act("submit")),
        artifacts=tuple(dict.fromkeys(str(check.path) for check in checks if check.path)),
    )  # fmt: skip
