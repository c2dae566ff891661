"""Levels 2 and 3 of the suite `workplace`: requests in a mail, and errands of several steps."""

from __future__ import annotations

import random
from collections.abc import Callable

from nano_shared.types import OracleAction
from nano_suites.family import TEAMS, WORDS, act, day, hour
from nano_suites.office import Office

Errand = tuple[str, list[OracleAction]]
DrawErrand = Callable[[random.Random, Office], Errand]


def _asked(rng: random.Random, office: Office, subject: str, body: str) -> tuple[str, Errand]:
    """A mail that asks for something: who sent it, the prompt, and the reading of it."""
    sender = office.anyone(rng)
    key = office.receive(rng, office.address(sender), subject, body)
    office.begin()
    prompt = f'Do what the mail "{subject}" asks for, and nothing else.'
    return sender, (prompt, [act("list_mail"), act("read_mail", id=key)])


# ---------------------------------------------------------------------------- level 2: what a mail asks for


def _asked_book(rng: random.Random, office: Office) -> Errand:
    title, date, time, who = f"{rng.choice(WORDS).capitalize()} talk", day(rng), hour(rng), office.anyone(rng)
    body = f'Please put the event "{title}" in your calendar on {date} at {time}, with {who} and nobody else.'
    _, (prompt, actions) = _asked(rng, office, "A date", body)
    office.book(title, date, time, [who])
    return prompt, [*actions, act("create_event", title=title, date=date, time=time, attendees=who)]


def _asked_move(rng: random.Random, office: Office) -> Errand:
    event, date, time = rng.choice(sorted(office.calendar)), day(rng), hour(rng)
    body = f'Please move "{office.calendar[event]["title"]}" to {date} at {time}.'
    _, (prompt, actions) = _asked(rng, office, "A new time", body)
    office.calendar[event] |= {"date": date, "time": time}
    return prompt, [*actions, act("list_events"), act("move_event", id=event, date=date, time=time)]


def _asked_cancel(rng: random.Random, office: Office) -> Errand:
    event = rng.choice(sorted(office.calendar))
    body = f'I cannot come. Please cancel "{office.calendar[event]["title"]}".'
    _, (prompt, actions) = _asked(rng, office, "Sorry", body)
    del office.calendar[event]
    return prompt, [*actions, act("list_events"), act("cancel_event", id=event)]


def _asked_phone(rng: random.Random, office: Office) -> Errand:
    name, phone = office.anyone(rng), office.new_phone(rng)
    body = f"{name} has a new phone number: {phone}. Please change it in your contacts."
    _, (prompt, actions) = _asked(rng, office, "New number", body)
    office.contacts[name]["phone"] = phone
    return prompt, [*actions, act("save_contact", name=name, phone=phone)]


def _asked_team(rng: random.Random, office: Office) -> Errand:
    name = office.anyone(rng)
    team = rng.choice([team for team in TEAMS if team != office.contacts[name]["team"]])
    _, (prompt, actions) = _asked(
        rng, office, "A move", f"{name} now works in {team}. Please change the team in your contacts."
    )
    office.contacts[name]["team"] = team
    return prompt, [*actions, act("save_contact", name=name, team=team)]


def _asked_mail(rng: random.Random, office: Office) -> Errand:
    name, text = office.anyone(rng), f"The {rng.choice(WORDS)} keys are at the desk."
    body = f'Please send {name} a mail with the subject "Keys" and the text "{text}"'
    _, (prompt, actions) = _asked(rng, office, "A message", body)
    office.send(office.address(name), "Keys", text)
    sent = act("send_mail", to=office.address(name), subject="Keys", body=text)
    return prompt, [*actions, act("find_contact", query=name), sent]


def _asked_number(rng: random.Random, office: Office) -> Errand:
    name = office.anyone(rng)
    body = f'What is the phone number of {name}? Please mail it to me, alone, with the subject "Number".'
    sender, (prompt, actions) = _asked(rng, office, "A question", body)
    to, phone = office.address(sender), office.contacts[name]["phone"]
    office.send(to, "Number", phone)
    return prompt, [
        *actions,
        act("find_contact", query=name),
        act("send_mail", to=to, subject="Number", body=phone),
    ]


def _asked_date(rng: random.Random, office: Office) -> Errand:
    event = office.calendar[rng.choice(sorted(office.calendar))]
    ask = f'On which date is "{event["title"]}"?'
    body = f'{ask} Please mail me the date, as YYYY-MM-DD, with the subject "Date".'
    sender, (prompt, actions) = _asked(rng, office, "When", body)
    to = office.address(sender)
    office.send(to, "Date", event["date"])
    return prompt, [*actions, act("list_events"), act("send_mail", to=to, subject="Date", body=event["date"])]


REQUESTS: dict[str, DrawErrand] = {
    "book": _asked_book, "move": _asked_move, "cancel": _asked_cancel, "phone": _asked_phone,
    "team": _asked_team, "mail": _asked_mail, "number": _asked_number, "date": _asked_date,
}  # fmt: skip

# ------------------------------------------------------------------------------- level 3: several steps


def _members(rng: random.Random, office: Office) -> tuple[str, list[str]]:
    """A team of two or three, and who is in it."""
    team = rng.choice([team for team in TEAMS if team not in {c["team"] for c in office.contacts.values()}])
    names = rng.sample(sorted(office.contacts), rng.randint(2, 3))
    for name in names:
        office.contacts[name]["team"] = team
    office.begin()
    return team, sorted(names)


def _mail_team(rng: random.Random, office: Office) -> Errand:
    team, names = _members(rng, office)
    subject, body = f"{rng.choice(WORDS).capitalize()} day", f"We meet at {hour(rng)}."
    for name in names:
        office.send(office.address(name), subject, body)
    prompt = f'Send everybody of the team {team} a mail with the subject "{subject}" and the text "{body}"'
    mails = [act("send_mail", to=office.address(name), subject=subject, body=body) for name in names]
    return prompt, [act("find_contact", query=team), *mails]


def _invite_team(rng: random.Random, office: Office) -> Errand:
    team, names = _members(rng, office)
    title, date, time = f"{rng.choice(WORDS).capitalize()} workshop", day(rng), hour(rng)
    office.book(title, date, time, names)
    prompt = f'Put "{title}" in the calendar on {date} at {time}, with everybody of the team {team}.'
    made = act("create_event", title=title, date=date, time=time, attendees=", ".join(names))
    return prompt, [act("find_contact", query=team), made]


def _cancel_day(rng: random.Random, office: Office) -> Errand:
    date = day(rng)
    some = rng.sample(sorted(office.calendar), 2)
    for key in some:
        office.calendar[key]["date"] = date
    office.begin()
    gone = [key for key, event in office.calendar.items() if event["date"] == date]
    for key in gone:
        del office.calendar[key]
    cancelled = [act("cancel_event", id=key) for key in gone]
    return f"I am away on {date}. Cancel all events of that date.", [
        act("list_events", date=date),
        *cancelled,
    ]


def _cancel_and_tell(rng: random.Random, office: Office) -> Errand:
    event = office.calendar.pop(key := rng.choice(sorted(office.calendar)))
    subject, body = f"Cancelled: {event['title']}", "I have to cancel it."
    actions = [act("list_events"), act("cancel_event", id=key)]
    for name in event["attendees"]:
        office.send(office.address(name), subject, body)
        actions.append(act("find_contact", query=name))
        actions.append(act("send_mail", to=office.address(name), subject=subject, body=body))
    prompt = (
        f'Cancel the event "{event["title"]}" and send each attendee a mail with the subject "{subject}" and '
        f'the text "{body}"'
    )
    return prompt, actions


def _forward(rng: random.Random, office: Office) -> Errand:
    key, name = rng.choice(sorted(office.inbox)), office.anyone(rng)
    mail = office.inbox.pop(key)
    subject = f"Fwd: {mail['subject']}"
    office.send(office.address(name), subject, mail["body"])
    prompt = (
        f'Forward the mail "{mail["subject"]}" to {name}: its text alone, with the subject "{subject}". '
        "Then delete it."
    )
    sent = act("send_mail", to=office.address(name), subject=subject, body=mail["body"])
    look = [act("list_mail"), act("read_mail", id=key), act("find_contact", query=name)]
    return prompt, [*look, sent, act("delete_mail", id=key)]


def _clear(rng: random.Random, office: Office) -> Errand:
    sender = rng.choice(sorted(office.contacts))
    address = office.address(sender)
    for word in rng.sample(WORDS, 2):
        office.receive(rng, address, f"More on {word}", f"See {word}.")
    office.begin()
    gone = [key for key, mail in office.inbox.items() if mail["from"] == address]
    for key in gone:
        del office.inbox[key]
    look = [act("find_contact", query=sender), act("list_mail")]
    return f"Delete all mails from {sender}.", [*look, *(act("delete_mail", id=key) for key in gone)]


def _swap(rng: random.Random, office: Office) -> Errand:
    keys = rng.sample(sorted(office.calendar), 2)
    one, other = (office.calendar[key] for key in keys)
    first, second = (one["date"], one["time"]), (other["date"], other["time"])
    one["date"], one["time"], other["date"], other["time"] = *second, *first
    prompt = f'Let the events "{one["title"]}" and "{other["title"]}" change places: date and time.'
    moves = [
        act("move_event", id=key, date=date, time=time)
        for key, (date, time) in zip(keys, (second, first), strict=True)
    ]
    return prompt, [act("list_events"), *moves]


def _merge_teams(rng: random.Random, office: Office) -> Errand:
    team, names = _members(rng, office)
    new = rng.choice([name for name in TEAMS if name != team])
    for name in names:
        office.contacts[name]["team"] = new
    prompt = f"The team {team} now belongs to the team {new}. Change the contacts of everybody in it."
    return prompt, [
        act("find_contact", query=team),
        *(act("save_contact", name=name, team=new) for name in names),
    ]


ERRANDS: dict[str, DrawErrand] = {
    "mail_team": _mail_team, "invite_team": _invite_team, "cancel_day": _cancel_day,
    "cancel_and_tell": _cancel_and_tell, "forward": _forward, "clear": _clear, "swap": _swap,
    "merge_teams": _merge_teams,
}  # fmt: skip
