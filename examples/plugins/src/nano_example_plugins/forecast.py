"""A command of nano-coder: an annotated function."""

from __future__ import annotations

import json
from typing import Annotated

from typer import Argument

from nano_example_plugins.weather import DEGREES
from nano_shared.command_line import JsonOption
from nano_shared.errors import UsageError


def command(
    city: Annotated[str, Argument(help="Of which the weather is told.")], as_json: JsonOption = False
) -> int:
    """Tell the temperature of a city."""
    if city not in DEGREES:
        raise UsageError(f"no weather of {city!r}; there is that of {', '.join(DEGREES)}")
    print(json.dumps({city: DEGREES[city]}) if as_json else f"{city}: {DEGREES[city]} C")
    return 0
