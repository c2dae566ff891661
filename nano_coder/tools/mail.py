"""The mail tools: an inbox to read and an outbox by recipient, as files of the workspace."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from nano_coder.tools.records import Records, pick
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

_ADDRESS = re.compile(r"[^@\s,;]+@[^@\s,;]+\.[^@\s,;]+")


class Mail(BaseModel):
    """A mail that came."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)

    sender: str = Field(alias="from")
    subject: str
    body: str


class Sent(BaseModel):
    """A mail that went out, filed under its recipient."""

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
