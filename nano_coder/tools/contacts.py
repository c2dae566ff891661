"""The contact tools: people with address, phone and team, as a file of the workspace."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, TypeAdapter

from nano_coder.tools.records import Records
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool


class Contact(BaseModel):
    """A person, filed under the name."""

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
