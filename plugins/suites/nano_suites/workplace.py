"""The suite `workplace`: mail, calendar and contacts by tool calls; the final state is checked.

Every file is checked, so that an agent that sends, books or deletes anything else fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.types import OracleAction
from nano_suites.errands import ERRANDS, REQUESTS, DrawErrand, Errand
from nano_suites.family import (
    TEAMS,
    WORDS,
    Family,
    act,
    answered,
    day,
    hour,
    left,
    person,
    view,
)
from nano_suites.office import Office, draw_office

MAIL = ("list_mail", "read_mail", "send_mail", "delete_mail")
CALENDAR = ("list_events", "create_event", "move_event", "cancel_event")
TOOLS = (*MAIL, *CALENDAR, "find_contact", "save_contact", "submit")

OfficeQuestion = Callable[[random.Random, Office], tuple[str, str | int, list[OracleAction]]]


def _do(of: DrawErrand, rng: random.Random) -> Made:
    office = draw_office(rng)
    prompt, actions = of(rng, office)
    return left(prompt, office.start, office.checks, *actions)


def _ask(of: OfficeQuestion, rng: random.Random) -> Made:
    office = draw_office(rng)
    prompt, answer, actions = of(rng, office)
    return answered(prompt, office.start, answer, *actions)


def _subject(rng: random.Random) -> str:
    return f"{rng.choice(WORDS).capitalize()} {rng.choice(('report', 'budget', 'draft', 'offer', 'plan'))}"


def _line(rng: random.Random) -> str:
    return rng.choice(
        (
            f"The {rng.choice(WORDS)} file is ready.",
            f"Please call me about the {rng.choice(WORDS)} project.",
            f"The {rng.choice(WORDS)} room is booked.",
            f"Invoice {rng.randint(100, 999)} is paid.",
        )
    )


# -------------------------------------------------------------------- level 0: one call, all of it given


def _send(rng: random.Random, office: Office) -> Errand:
    to, subject, body = office.address(office.anyone(rng)), _subject(rng), _line(rng)
    office.send(to, subject, body)
    prompt = f'Send a mail to {to} with the subject "{subject}" and the text "{body}"'
    return prompt, [act("send_mail", to=to, subject=subject, body=body)]


def _book(rng: random.Random, office: Office) -> Errand:
    title, date, time, who = _subject(rng), day(rng), hour(rng), office.anyone(rng)
    office.book(title, date, time, [who])
    prompt = f'Put the event "{title}" in the calendar on {date} at {time}, with {who}.'
    return prompt, [act("create_event", title=title, date=date, time=time, attendees=who)]


def _book_alone(rng: random.Random, office: Office) -> Errand:
    title, date, time = _subject(rng), day(rng), hour(rng)
    office.book(title, date, time, [])
    prompt = f'Block {date} at {time} in the calendar, with the title "{title}" and nobody else.'
    return prompt, [act("create_event", title=title, date=date, time=time)]


def _add(rng: random.Random, office: Office) -> Errand:
    name = person(rng)
    while name in office.contacts:
        name = person(rng)
    email, phone, team = office.new_address(name), office.new_phone(rng), rng.choice(TEAMS)
    office.contacts[name] = {"email": email, "phone": phone, "team": team}
    prompt = f"Add {name} to the contacts: email {email}, phone {phone}, team {team}."
    return prompt, [act("save_contact", name=name, email=email, phone=phone, team=team)]


def _phone(rng: random.Random, office: Office) -> Errand:
    name, phone = office.anyone(rng), office.new_phone(rng)
    office.contacts[name]["phone"] = phone
    return f"The phone of {name} is now {phone}. Change the contact.", [
        act("save_contact", name=name, phone=phone)
    ]


def _team(rng: random.Random, office: Office) -> Errand:
    name = office.anyone(rng)
    team = rng.choice([team for team in TEAMS if team != office.contacts[name]["team"]])
    office.contacts[name]["team"] = team
    return f"{name} has moved to the team {team}. Change the contact.", [
        act("save_contact", name=name, team=team)
    ]


def _cancel_id(rng: random.Random, office: Office) -> Errand:
    key = rng.choice(sorted(office.calendar))
    del office.calendar[key]
    return f"Cancel the event {key}.", [act("cancel_event", id=key)]


def _delete_id(rng: random.Random, office: Office) -> Errand:
    key = rng.choice(sorted(office.inbox))
    del office.inbox[key]
    return f"Delete the mail {key}.", [act("delete_mail", id=key)]


def _move_id(rng: random.Random, office: Office) -> Errand:
    key, date, time = rng.choice(sorted(office.calendar)), day(rng), hour(rng)
    office.calendar[key] |= {"date": date, "time": time}
    return f"Move the event {key} to {date} at {time}.", [act("move_event", id=key, date=date, time=time)]


SINGLE: dict[str, DrawErrand] = {
    "send": _send, "book": _book, "book_alone": _book_alone, "add": _add, "phone": _phone, "team": _team,
    "cancel": _cancel_id, "delete": _delete_id, "move": _move_id,
}  # fmt: skip

# ---------------------------------------------------------------- level 1: something must be found first


def _send_name(rng: random.Random, office: Office) -> Errand:
    name, subject, body = office.anyone(rng), _subject(rng), _line(rng)
    office.send(office.address(name), subject, body)
    prompt = f'Send {name} a mail with the subject "{subject}" and the text "{body}"'
    sent = act("send_mail", to=office.address(name), subject=subject, body=body)
    return prompt, [act("find_contact", query=name), sent]


def _cancel_title(rng: random.Random, office: Office) -> Errand:
    key = rng.choice(sorted(office.calendar))
    title = office.calendar.pop(key)["title"]
    return f'Cancel the event "{title}".', [act("list_events"), act("cancel_event", id=key)]


def _move_title(rng: random.Random, office: Office) -> Errand:
    key, date, time = rng.choice(sorted(office.calendar)), day(rng), hour(rng)
    title = office.calendar[key]["title"]
    office.calendar[key] |= {"date": date, "time": time}
    actions = [act("list_events"), act("move_event", id=key, date=date, time=time)]
    return f'Move the event "{title}" to {date} at {time}.', actions


def _delete_from(rng: random.Random, office: Office) -> Errand:
    key = rng.choice(sorted(office.inbox))
    sender = office.inbox.pop(key)["from"]
    return f"Delete the mail that came from {sender}.", [act("list_mail"), act("delete_mail", id=key)]


def _delete_subject(rng: random.Random, office: Office) -> Errand:
    key = rng.choice(sorted(office.inbox))
    subject = office.inbox.pop(key)["subject"]
    return f'Delete the mail with the subject "{subject}".', [act("list_mail"), act("delete_mail", id=key)]


def _reply(rng: random.Random, office: Office) -> Errand:
    key, body = rng.choice(sorted(office.inbox)), _line(rng)
    mail = office.inbox[key]
    office.send(mail["from"], f"Re: {mail['subject']}", body)
    subject = mail["subject"]
    prompt = f'Reply to the mail "{subject}", with the subject "Re: {subject}" and the text "{body}"'
    return prompt, [
        act("list_mail"),
        act("send_mail", to=mail["from"], subject=f"Re: {mail['subject']}", body=body),
    ]


FIND: dict[str, DrawErrand] = {
    "send_name": _send_name, "cancel_title": _cancel_title, "move_title": _move_title,
    "delete_from": _delete_from, "delete_subject": _delete_subject, "reply": _reply,
}  # fmt: skip


def _ask_phone(rng: random.Random, office: Office) -> tuple[str, str, list[OracleAction]]:
    name = office.anyone(rng)
    return (
        f"What is the phone number of {name}?",
        office.contacts[name]["phone"],
        [act("find_contact", query=name)],
    )


def _ask_owner(rng: random.Random, office: Office) -> tuple[str, str, list[OracleAction]]:
    name = office.anyone(rng)
    phone = office.contacts[name]["phone"]
    return f"Whose phone number is {phone}? Submit the name.", name, [act("find_contact", query=phone)]


def _ask_when(rng: random.Random, office: Office) -> tuple[str, str, list[OracleAction]]:
    event = office.calendar[rng.choice(sorted(office.calendar))]
    return (
        f'On which date is "{event["title"]}"? Submit it as YYYY-MM-DD.',
        event["date"],
        [act("list_events")],
    )


def _ask_text(rng: random.Random, office: Office) -> tuple[str, str, list[OracleAction]]:
    key = rng.choice(sorted(office.inbox))
    mail = office.inbox[key]
    actions = [act("list_mail"), act("read_mail", id=key)]
    return f'What does the mail "{mail["subject"]}" say? Submit its text.', mail["body"], actions


def _ask_number(rng: random.Random, office: Office) -> tuple[str, int, list[OracleAction]]:
    team = rng.choice(sorted({c["team"] for c in office.contacts.values()}))
    number = sum(c["team"] == team for c in office.contacts.values())
    return f"How many contacts are in the team {team}?", number, [act("find_contact", query=team)]


ASK: dict[str, OfficeQuestion] = {
    "ask_phone": _ask_phone, "ask_owner": _ask_owner, "ask_when": _ask_when, "ask_text": _ask_text,
    "ask_number": _ask_number,
}  # fmt: skip


def _families() -> Iterable[Family]:
    yield from (Family(name, partial(_do, of)) for name, of in FIND.items())
    yield from (Family(name, partial(_ask, of)) for name, of in ASK.items())


SUITE = TaskSuite(
    name="workplace",
    version="1",
    about="mail, calendar and contacts by tool calls",
    views=(
        view("workplace", "single", 0, TOOLS, (Family(n, partial(_do, of)) for n, of in SINGLE.items())),
        view("workplace", "find", 1, TOOLS, _families()),
        view("workplace", "request", 2, TOOLS, (Family(n, partial(_do, of)) for n, of in REQUESTS.items())),
        view("workplace", "errand", 3, TOOLS, (Family(n, partial(_do, of)) for n, of in ERRANDS.items())),
    ),
)
