"""The office of `workplace` tasks: inbox, outbox, calendar and contacts, in the files of the tools."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from nano_shared.hidden_checks import StateCheck
from nano_suites.family import TEAMS, WORDS, day, hour, people

Record = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Office:
    """Its files as they are now; a task changes it into what must be left, once it has begun."""

    inbox: dict[str, Record]
    calendar: dict[str, Record]
    contacts: dict[str, Record]
    outbox: dict[str, list[Record]] = field(default_factory=dict)
    start: dict[str, str] = field(default_factory=dict)
    """files that the agent finds"""

    @property
    def files(self) -> dict[str, str]:
        named = {
            "inbox": self.inbox,
            "outbox": self.outbox,
            "calendar": self.calendar,
            "contacts": self.contacts,
        }
        return {f"{name}.json": json.dumps(records, indent=1) + "\n" for name, records in named.items()}

    def begin(self) -> None:
        """What is there now is what the agent finds."""
        self.start = self.files

    @property
    def checks(self) -> list[StateCheck]:
        return [
            StateCheck(kind="json", path=path, expected=json.loads(text)) for path, text in self.files.items()
        ]

    def anyone(self, rng: random.Random) -> str:
        return rng.choice(list(self.contacts))

    def address(self, name: str) -> str:
        return str(self.contacts[name]["email"])

    def new_address(self, name: str) -> str:
        return f"{name.lower().replace(' ', '.')}@example.org"

    def new_phone(self, rng: random.Random) -> str:
        return f"555-{rng.randint(1000, 9999)}"

    def send(self, to: str, subject: str, body: str) -> None:
        self.outbox.setdefault(to, []).append({"subject": subject, "body": body})

    def book(self, title: str, date: str, time: str, attendees: list[str]) -> str:
        key = f"e{1 + max((int(key[1:]) for key in self.calendar), default=0)}"
        self.calendar[key] = {"title": title, "date": date, "time": time, "attendees": sorted(attendees)}
        return key

    def receive(self, rng: random.Random, sender: str, subject: str, body: str) -> str:
        """A mail more, somewhere in the inbox. Returns its id."""
        key = f"m{1 + max((int(key[1:]) for key in self.inbox), default=0)}"
        mails = list(self.inbox.items())
        mails.insert(rng.randint(0, len(mails)), (key, {"from": sender, "subject": subject, "body": body}))
        self.inbox = dict(mails)
        return key


def draw_office(rng: random.Random) -> Office:
    """Six to eight contacts, three to five mails and as many events; titles and subjects are distinct."""
    names = people(rng, rng.randint(6, 8))
    teams = rng.sample(TEAMS, 3)
    phones = rng.sample(range(1000, 10000), len(names))
    contacts = {
        name: {
            "email": f"{name.lower().replace(' ', '.')}@example.org",
            "phone": f"555-{phone}",
            "team": rng.choice(teams),
        }
        for name, phone in zip(names, phones, strict=True)
    }
    topics = rng.sample(WORDS, 10)
    office = Office(inbox={}, calendar={}, contacts=contacts)
    for number, sender in enumerate(rng.sample(names, rng.randint(3, 5))):
        said = rng.choice(("is late", "is done", "needs your help", "looks good", "was moved"))
        body = f"The {topics[number]} work {said}."
        office.receive(rng, contacts[sender]["email"], f"About {topics[number]}", body)
    for number in range(rng.randint(3, 5)):
        title = f"{topics[5 + number].capitalize()} {rng.choice(('call', 'review', 'lunch', 'meeting'))}"
        office.book(title, day(rng), hour(rng), rng.sample(names, rng.randint(1, 3)))
    office.begin()
    return office
