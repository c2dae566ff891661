"""A tool: a typed function that the agent may call."""

from nano_coder.tools.tool import ToolContext, ToolFailure, tool

DEGREES = {"Bonn": 14, "Cairo": 31, "Lima": 19, "Oslo": 3, "Perth": 24, "Quito": 16}


@tool()
def weather(context: ToolContext, city: str, unit: str = "C") -> str:
    """Tell the temperature of a city, in C or F."""
    if city not in DEGREES:
        raise ToolFailure(f"no weather of {city!r}; there is that of {', '.join(DEGREES)}")
    degrees = DEGREES[city] if unit == "C" else DEGREES[city] * 9 // 5 + 32
    return f"{city}: {degrees} {unit}"
