"""The calendar tools: events by id, as a file of the workspace."""

from __future__ import annotations

import re
from datetime import date as Date

from pydantic import BaseModel, ConfigDict, TypeAdapter

from nano_coder.tools.records import Records, pick
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool


class Event(BaseModel):
    """An event of the calendar."""

    model_config = ConfigDict(extra="forbid")

    title: str
    date: str
    """YYYY-MM-DD"""
    time: str
    """HH:MM"""
    attendees: list[str]
    """names, sorted"""


CALENDAR = Records("calendar.json", TypeAdapter(dict[str, Event]))


@tool()
def list_events(context: ToolContext, date: str | None = None) -> ToolResult:
    """List the events of the calendar, or those of one date (YYYY-MM-DD)."""
    events = CALENDAR.load(context)
    shown = [(e.date, e.time, key, e) for key, e in events.items() if date in (None, e.date)]
    lines = [
        f"{key} {event.date} {event.time} {event.title}"
        + (f" with {', '.join(event.attendees)}" if event.attendees else "")
        for _, _, key, event in sorted(shown, key=lambda row: row[:3])
    ]
    return ToolResult(text="\n".join(lines) or "[no events]")


@tool(mutates=True)
def create_event(context: ToolContext, title: str, date: str, time: str, attendees: str = "") -> ToolResult:
    """Put an event in the calendar: date YYYY-MM-DD, time HH:MM, attendees' names separated by commas."""
    _check(date, time)
    events = CALENDAR.load(context)
    key = f"e{1 + max((int(k[1:]) for k in events if re.fullmatch(r'e[0-9]{1,9}', k)), default=0)}"
    names = sorted({name.strip() for name in attendees.split(",") if name.strip()})
    events[key] = Event(title=title.strip(), date=date, time=time, attendees=names)
    CALENDAR.save(context, events)
    return ToolResult(text=f"created {key}")


@tool(mutates=True)
def move_event(context: ToolContext, id: str, date: str, time: str) -> ToolResult:
    """Move an event to another date (YYYY-MM-DD) and time (HH:MM)."""
    _check(date, time)
    events = CALENDAR.load(context)
    events[id] = pick(events, id, "event").model_copy(update={"date": date, "time": time})
    CALENDAR.save(context, events)
    return ToolResult(text=f"moved {id}")


@tool(mutates=True)
def cancel_event(context: ToolContext, id: str) -> ToolResult:
    """Take an event out of the calendar."""
    events = CALENDAR.load(context)
    pick(events, id, "event")
    del events[id]
    CALENDAR.save(context, events)
    return ToolResult(text=f"cancelled {id}")


def _check(date: str, time: str) -> None:
    try:
        if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", date):
            raise ValueError
        Date.fromisoformat(date)
    except ValueError:
        raise ToolFailure(f"date {date!r} is not a day as YYYY-MM-DD") from None
    if not re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", time):
        raise ToolFailure(f"time {time!r} is not a time as HH:MM")
