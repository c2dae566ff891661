"""The environment: small questions that take a tool and several turns, with a reward by rule.

    what is 5 + 3 ?                      calculate 5 + 3      -> 8                         answer 8
    what is the capital of France ?      search France        -> Paris                     answer Paris
    what is the P/E ratio of Acme ?      search Acme          -> price 1 2 0 earnings 8
                                         calculate 1 2 0 / 8  -> 1 5                       answer 1 5

Text is words between spaces, and a number is its digits, so that a word is a token. The price and earnings of
a company are drawn for each task: no policy can know them without the tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo",
    "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo",
}  # fmt: skip
COMPANIES = ("Acme", "Globex", "Initech", "Umbrella")
ERROR = "error"
MAX_TURNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    prompt: str
    answer: str
    """what earns the reward; the policy never sees it"""
    facts: Mapping[str, str]
    """what `search` finds"""
    oracle: tuple[str, ...]
    """actions that earn 1"""
    guess: str
    """an answer of the right kind, at random"""


class EnvironmentSession:
    """One task under way. An action is a tool and its argument; `answer` ends the session."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.turns = 0
        self.answered: str | None = None

    @property
    def done(self) -> bool:
        return self.answered is not None or self.turns == MAX_TURNS

    def step(self, action: str) -> str:
        """Carry an action out. Returns the observation: a mistake of the policy's is an observation too."""
        self.turns += 1
        tool, _, argument = action.partition(" ")
        if tool == "answer":
            self.answered = argument
            return ""
        if tool == "search":
            return self.task.facts.get(argument, ERROR)
        return calculate(argument) if tool == "calculate" else ERROR

    def grade(self) -> float:
        """The reward: 1 for the right answer, otherwise 0."""
        return float(self.answered == self.task.answer)


class Environment:
    """Where tasks come from, and what starts a session on one."""

    def tasks(self, seed: str, count: int) -> list[Task]:
        """`count` tasks, of the three kinds in turn."""
        random = Random(seed)
        kinds = (_sum, _capital, _ratio)
        return [kinds[number % len(kinds)](random) for number in range(count)]

    def demonstrations(self, seed: str, count: int) -> list[tuple[Task, tuple[str, ...]]]:
        """Tasks with actions to imitate, of a careless teacher: in half of them it guesses without a tool."""
        return [
            (task, task.oracle if number % 2 else (f"answer {task.guess}",))
            for number, task in enumerate(self.tasks(seed, count))
        ]

    def start(self, task: Task) -> EnvironmentSession:
        return EnvironmentSession(task)

    @property
    def words(self) -> list[str]:
        """Every word of prompts, actions and observations: the vocabulary of a policy."""
        asked = ["what", "is", "the", "capital", "of", "P/E", "ratio", "?"]
        tools = ["calculate", "search", "answer", "price", "earnings", ERROR]
        return [*"0123456789+/", *asked, *tools, *CAPITALS, *CAPITALS.values(), *COMPANIES]


def calculate(expression: str) -> str:
    """The sum or the whole quotient of two numbers."""
    match = re.fullmatch(r"(\d+)([+/])(\d+)", expression.replace(" ", ""))
    if not match:
        return ERROR
    left, operator, right = int(match[1]), match[2], int(match[3])
    if operator == "+":
        return spelled(left + right)
    return spelled(left // right) if right else ERROR


def spelled(number: int) -> str:
    """A number as words, one a digit."""
    return " ".join(str(number))


def _sum(random: Random) -> Task:
    left, right = random.randint(1, 9), random.randint(1, 9)
    expression, answer = f"{spelled(left)} + {spelled(right)}", spelled(left + right)
    oracle = (f"calculate {expression}", f"answer {answer}")
    guess = spelled(random.randint(2, 18))
    return Task(prompt=f"what is {expression} ?", answer=answer, facts={}, oracle=oracle, guess=guess)


def _capital(random: Random) -> Task:
    country = random.choice(list(CAPITALS))
    oracle = (f"search {country}", f"answer {CAPITALS[country]}")
    prompt, guess = f"what is the capital of {country} ?", random.choice(list(CAPITALS.values()))
    return Task(prompt=prompt, answer=CAPITALS[country], facts=CAPITALS, oracle=oracle, guess=guess)


def _ratio(random: Random) -> Task:
    company, ratio, earnings = random.choice(COMPANIES), random.randint(2, 19), random.randint(2, 9)
    price, answer = spelled(ratio * earnings), spelled(ratio)
    oracle = (f"search {company}", f"calculate {price} / {earnings}", f"answer {answer}")
    facts, guess = {company: f"price {price} earnings {earnings}"}, spelled(random.randint(2, 19))
    prompt = f"what is the P/E ratio of {company} ?"
    return Task(prompt=prompt, answer=answer, facts=facts, oracle=oracle, guess=guess)
