"""A suite: tasks that are made by the number, here with a tool of this package."""

import random

from nano_example_plugins.weather import DEGREES
from nano_rl.tasks.suite import Made, TaskSuite, View, split_of
from nano_shared.files import content_hash
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.types import OracleAction, Split


def ask(rng: random.Random, split: Split, level: int) -> Made:
    city = rng.choice([city for city in DEGREES if split_of(f"forecasts:{city}") is split])
    degrees = DEGREES[city]
    prompt = f"How many degrees Celsius has {city}? Submit the number."
    return Made(
        prompt=prompt, program=(f"forecasts:{city}", content_hash(prompt)), files={},
        tools=("weather", "submit"), hidden=AnswerChecks(answer=degrees),
        oracle=(
            OracleAction(name="weather", arguments={"city": city}),
            OracleAction(name="submit", arguments={"answer": str(degrees)}),
        ),
    )  # fmt: skip


SUITE = TaskSuite(name="forecasts", version="1", about="questions for a tool", views=(View("ask", 0, ask),))
