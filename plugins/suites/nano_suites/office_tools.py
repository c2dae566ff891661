"""The workplace tools: contacts, calendar and mail, kept as JSON records in files of the workspace.

The end state of a task is in these files: graders read them, and trust no tool. A changed name, argument or
description would change the profiles compact-2 and hermes-2, whose hashes a test checks.
"""

from __future__ import annotations

import re
from datetime import date as Date
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_suites.record_file import Records

OfficeRecord = TypeVar("OfficeRecord")


def pick(records: dict[str, OfficeRecord], key: str, noun: str) -> OfficeRecord:
    """The record with this key. Raises ToolFailure with the existing keys."""
    if key not in records:
        some = ", ".join(sorted(records)[:20]) or "none"
        raise ToolFailure(f"no {noun} {key!r}; there are: {some}")
    return records[key]


class Contact(BaseModel):
    """A person; the key is the name."""

    model_config = ConfigDict(extra="forbid")

    email: str
    phone: str
    team: str


CONTACTS = Records("contacts.json", TypeAdapter(dict[str, Contact]))


@tool()
def find_contact(context: ToolContext, query: str) -> ToolResult:
    """Find people by a part of their name, address, phone or team."""
    wanted = query.strip().casefold()
    lines = [
        f"{name}: {person.email}, {person.phone}, team {person.team}"
        for name, person in CONTACTS.load(context).items()
        if wanted in "\n".join((name, person.email, person.phone, person.team)).casefold()
    ]
    if not lines:
        raise ToolFailure(f"nobody matches {query!r}")
    return ToolResult(text="\n".join(lines))


@tool(mutates=True)
def save_contact(
    context: ToolContext,
    name: str,
    email: str | None = None,
    phone: str | None = None,
    team: str | None = None,
) -> ToolResult:
    """Add a person, or change what is given of one who is there."""
    contacts = CONTACTS.load(context)
    name = name.strip()
    given = {"email": email, "phone": phone, "team": team}
    new = {key: value.strip() for key, value in given.items() if value is not None}
    known = contacts[name].model_dump() if name in contacts else {"email": "", "phone": "", "team": ""}
    if not name or not new:
        raise ToolFailure("give a name and at least one of email, phone and team")
    contacts[name] = Contact(**{**known, **new})
    CONTACTS.save(context, contacts)
    return ToolResult(text=f"saved {name}")


class CalendarEvent(BaseModel):
    """An event of the calendar."""

    model_config = ConfigDict(extra="forbid")

    title: str
    date: str
    """YYYY-MM-DD"""
    time: str
    """HH:MM"""
    attendees: list[str]
    """names, sorted"""


CALENDAR = Records("calendar.json", TypeAdapter(dict[str, CalendarEvent]))


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
    events[key] = CalendarEvent(title=title.strip(), date=date, time=time, attendees=names)
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


_ADDRESS = re.compile(r"[^@\s,;]+@[^@\s,;]+\.[^@\s,;]+")


class Mail(BaseModel):
    """A received mail."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    sender: str = Field(alias="from")
    subject: str
    body: str


class Sent(BaseModel):
    """A sent mail; the key is the recipient."""

    model_config = ConfigDict(extra="forbid")

    subject: str
    body: str


INBOX = Records("inbox.json", TypeAdapter(dict[str, Mail]))
OUTBOX = Records("outbox.json", TypeAdapter(dict[str, list[Sent]]))


@tool()
def list_mail(context: ToolContext) -> ToolResult:
    """List the mails of the inbox: id, sender and subject."""
    inbox = INBOX.load(context)
    lines = [f"{key} from {mail.sender}: {mail.subject}" for key, mail in inbox.items()]
    return ToolResult(text="\n".join(lines) or "[no mail]")


@tool()
def read_mail(context: ToolContext, id: str) -> ToolResult:
    """Show one mail of the inbox."""
    mail = pick(INBOX.load(context), id, "mail")
    return ToolResult(text=f"from: {mail.sender}\nsubject: {mail.subject}\n\n{mail.body}")


@tool(body="body", mutates=True)
def send_mail(context: ToolContext, to: str, subject: str, body: str) -> ToolResult:
    """Send a mail to one address."""
    to = to.strip()
    if not _ADDRESS.fullmatch(to):
        raise ToolFailure(f"{to!r} is not one mail address; find_contact gives addresses")
    outbox = OUTBOX.load(context)
    outbox.setdefault(to, []).append(Sent(subject=subject.strip(), body=body.strip()))
    OUTBOX.save(context, outbox)
    return ToolResult(text=f"sent to {to}")


@tool(mutates=True)
def delete_mail(context: ToolContext, id: str) -> ToolResult:
    """Delete one mail of the inbox."""
    inbox = INBOX.load(context)
    pick(inbox, id, "mail")
    del inbox[id]
    INBOX.save(context, inbox)
    return ToolResult(text=f"deleted {id}")
