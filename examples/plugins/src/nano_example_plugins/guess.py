"""An environment of one's own: a number that is found by asking. --env ./guess.py:Guess"""

from nano_coder.environment import EnvironmentSession
from nano_coder.tools.tool import tool


class Game(EnvironmentSession):
    def __init__(self, number: int) -> None:
        self.number = number

    @tool()
    def guess(self, number: int) -> str:
        """Tell whether the number is the one that is looked for."""
        self.done = number == self.number
        return "found" if self.done else "too low" if number < self.number else "too high"

    def grade(self, run):
        return float(self.done)


class Guess:
    def __init__(self, largest: int = 4) -> None:
        self.largest = largest

    def tasks(self, split, seed):
        for number in range(1, self.largest + 1):
            yield {"prompt": f"Find the number, 1 to {self.largest}.", "key": number, "number": number}

    def start(self, row, limits):
        return Game(row["number"])
