"""The suite `services`: requests to a service that is known by its OpenAPI description alone.

The service is the tool `call_service`, which answers by the description and by the state that the task
begins with: lists in pages, refused bodies, records that name others, and calls that have to be made again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlencode

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_shared.types import Limits, OracleAction
from nano_suites.family import CITIES, COLORS, WORDS, Family, act, answered, left, people, view
from nano_suites.record_file import written
from nano_suites.service_description import Domain, describe
from nano_suites.service_tools import DESCRIPTION, OUTAGES, ServiceRecord, records_of

TOOLS = ("call_service", "calculate", "submit")
LIMITS = Limits(max_turns=24, max_tokens=4096)
PAGE = 5
"""records of a page"""
SIZES = (4, 5, 14, 12)
"""records of the main collection at each level"""

DOMAINS = {
    "shop": Domain("orders", "customers", "customer", "product", "quantity", ("open", "paid", "shipped")),
    "clinic": Domain("visits", "patients", "patient", "room", "minutes", ("planned", "held", "missed")),
    "library": Domain("loans", "readers", "reader", "shelf", "days", ("out", "back", "lost")),
    "garage": Domain("repairs", "drivers", "driver", "part", "hours", ("waiting", "begun", "done")),
    "hotel": Domain("bookings", "guests", "guest", "suite", "nights", ("asked", "agreed", "left")),
    "school": Domain("courses", "teachers", "teacher", "subject", "seats", ("draft", "full", "over")),
}  # fmt: skip


@dataclass(slots=True)
class Service:
    """A service as a task finds it, and what has been done to it."""

    domain: Domain
    main: dict[str, ServiceRecord]
    other: dict[str, ServiceRecord]
    outages: dict[str, int]
    start: dict[str, str]
    """files that the agent finds"""

    @property
    def state(self) -> dict[str, dict[str, ServiceRecord]]:
        named = {self.domain.main: self.main, self.domain.other: self.other}
        return {records_of(name).path: records for name, records in named.items()}

    @property
    def checks(self) -> list[StateCheck]:
        return [StateCheck(kind="json", path=path, expected=state) for path, state in self.state.items()]

    def call(
        self,
        method: str,
        collection: str,
        key: str | None = None,
        *,
        body: ServiceRecord | None = None,
        query: Mapping[str, str | int] | None = None,
    ) -> list[OracleAction]:
        """The calls that get through: one, and one more for each that is answered 503."""
        path = f"/{collection}" + (f"/{key}" if key else "") + (f"?{urlencode(query)}" if query else "")
        given = {"body": json.dumps(body)} if body is not None else {}
        name = f"{method} /{collection}" + ("/{id}" if key else "")
        again = self.outages.pop(name, 0)
        return [act("call_service", method=method, path=path, **given)] * (1 + again)

    def pages(self, found: int, **query: str) -> list[OracleAction]:
        """The calls that list so many records of the main collection, page by page."""
        pages = range(1, max(1, -(-found // PAGE)) + 1)
        first = self.call("GET", self.domain.main, query=query)
        more = [self.call("GET", self.domain.main, query={"page": page, **query}) for page in pages[1:]]
        return [*first, *(action for actions in more for action in actions)]


def _service(domain: Domain, level: int, rng: random.Random) -> Service:
    names = people(rng, 6 if level == 3 else 3)
    other = {
        f"{domain.other[0]}{n}": {"name": name, "city": rng.choice(CITIES)} for n, name in enumerate(names, 1)
    }
    labels = rng.sample(WORDS, SIZES[level])
    main = {
        f"{domain.main[0]}{n}": {
            domain.refers: rng.choice(list(other)), domain.label: label,
            domain.amount: rng.randint(1, 40), "status": rng.choice(domain.statuses),
        }
        for n, label in enumerate(labels, 1)
    }  # fmt: skip
    outages = {f"GET /{domain.main}": rng.randint(1, 2)} if level >= 2 else {}
    service = Service(domain, main, other, outages, {})
    files = {path: written(records) for path, records in service.state.items()}
    files[DESCRIPTION] = json.dumps(describe(domain, PAGE), indent=1) + "\n"
    files[OUTAGES.path] = written(outages)
    service.start = files
    return service


# a request: what is asked, the answer (None: the end state counts), and the calls
ServiceRequest = tuple[str, str | int | None, list[OracleAction]]
DrawRequest = Callable[[Service, random.Random], ServiceRequest]


def _draw(name: str, of: DrawRequest, level: int, rng: random.Random) -> Made:
    service = _service(DOMAINS[name], level, rng)
    asked, answer, calls = of(service, rng)
    prompt = f"The {name} is a service, which GET /{DESCRIPTION} describes. {asked}"
    steps = [act("call_service", method="GET", path=f"/{DESCRIPTION}"), *calls]
    if answer is not None:
        return answered(prompt, service.start, answer, *steps)
    return left(prompt, service.start, service.checks, *steps)


# ------------------------------------------------------------ level 0: one call, with everything given


def _get(service: Service, rng: random.Random) -> ServiceRequest:
    d, key = service.domain, rng.choice(list(service.main))
    asked = rng.choice((d.label, d.amount))
    return f"What is the {asked} of {key}?", service.main[key][asked], service.call("GET", d.main, key)


def _create(service: Service, rng: random.Random) -> ServiceRequest:
    d = service.domain
    made = {
        d.refers: rng.choice(list(service.other)), d.label: rng.choice(COLORS),
        d.amount: rng.randint(1, 40), "status": rng.choice(d.statuses),
    }  # fmt: skip
    service.main[f"{d.main[0]}{len(service.main) + 1}"] = made
    said = ", ".join(f"{name} {value}" for name, value in made.items())
    return f"Add one of {d.main}: {said}.", None, service.call("POST", d.main, body=made)


def _change(service: Service, rng: random.Random) -> ServiceRequest:
    d, key = service.domain, rng.choice(list(service.main))
    new = _other_status(service, key, rng)
    service.main[key]["status"] = new
    calls = service.call("PATCH", d.main, key, body={"status": new})
    return f"Set the status of {key} to {new}.", None, calls


def _delete(service: Service, rng: random.Random) -> ServiceRequest:
    d, key = service.domain, rng.choice(list(service.main))
    del service.main[key]
    return f"Delete {key}.", None, service.call("DELETE", d.main, key)


# --------------------------------------------------------------- level 1: the record has to be found


def _change_found(service: Service, rng: random.Random) -> ServiceRequest:
    d, key = service.domain, rng.choice(list(service.main))
    label, new = service.main[key][d.label], rng.randint(41, 90)
    service.main[key][d.amount] = new
    calls = service.call("GET", d.main, query={d.label: label})
    calls += service.call("PATCH", d.main, key, body={d.amount: new})
    return f"Set the {d.amount} of the one of {d.main} with {d.label} {label} to {new}.", None, calls


def _delete_found(service: Service, rng: random.Random) -> ServiceRequest:
    d, key = service.domain, rng.choice(list(service.main))
    label = service.main.pop(key)[d.label]
    calls = [*service.call("GET", d.main, query={d.label: label}), *service.call("DELETE", d.main, key)]
    return f"Delete the one of {d.main} with {d.label} {label}.", None, calls


def _get_other(service: Service, rng: random.Random) -> ServiceRequest:
    d, key = service.domain, rng.choice(list(service.main))
    other = service.main[key][d.refers]
    calls = [*service.call("GET", d.main, key), *service.call("GET", d.other, other)]
    return f"In which city is the {d.refers} of {key}?", service.other[other]["city"], calls


# -------------------------------------------------- level 2: lists in pages, and calls that fail at first


def _count(service: Service, rng: random.Random) -> ServiceRequest:
    d = service.domain
    status = rng.choice(sorted({one["status"] for one in service.main.values()}))
    found = [one for one in service.main.values() if one["status"] == status]
    calls = service.pages(len(found), status=status)
    return f"How many of {d.main} have the status {status}?", len(found), calls


def _total(service: Service, rng: random.Random) -> ServiceRequest:
    d, amounts = service.domain, [one[service.domain.amount] for one in service.main.values()]
    calls = [*service.pages(len(amounts)), act("calculate", expression=" + ".join(map(str, amounts)))]
    return f"What is the sum of the {d.amount} of all {d.main}?", sum(amounts), calls


def _largest(service: Service, rng: random.Random) -> ServiceRequest:
    d = service.domain
    key = rng.choice(list(service.main))
    service.main[key][d.amount] = 41 + rng.randint(0, 40)
    path = records_of(d.main).path
    service.start[path] = written(service.main)
    asked = f"Which of {d.main} has the largest {d.amount}? Submit its {d.label}."
    return asked, service.main[key][d.label], service.pages(len(service.main))


def _delete_all(service: Service, rng: random.Random) -> ServiceRequest:
    d = service.domain
    status = rng.choice(sorted({one["status"] for one in service.main.values()}))
    found = [key for key, one in service.main.items() if one["status"] == status]
    calls = service.pages(len(found), status=status)
    for key in found:
        del service.main[key]
        calls += service.call("DELETE", d.main, key)
    return f"Delete all {d.main} with the status {status}.", None, calls


# -------------------------------------------------------------------------- level 3: two collections


def _of_named(service: Service, rng: random.Random) -> tuple[str, str, list[str], list[OracleAction]]:
    """Somebody with a record at least: name, id, the ids of those, and the calls that find them."""
    d = service.domain
    owner = rng.choice(sorted({one[d.refers] for one in service.main.values()}))
    found = [key for key, one in service.main.items() if one[d.refers] == owner]
    name = service.other[owner]["name"]
    calls = service.call("GET", d.other, query={"name": name})
    return name, owner, found, [*calls, *service.pages(len(found), **{d.refers: owner})]


def _total_of(service: Service, rng: random.Random) -> ServiceRequest:
    d = service.domain
    name, _, found, calls = _of_named(service, rng)
    amounts = [service.main[key][d.amount] for key in found]
    calls.append(act("calculate", expression=" + ".join(map(str, amounts))))
    asked = f"What is the sum of the {d.amount} of all {d.main} whose {d.refers} is {name}?"
    return asked, sum(amounts), calls


def _change_all(service: Service, rng: random.Random) -> ServiceRequest:
    d = service.domain
    name, _, found, calls = _of_named(service, rng)
    had = {service.main[key]["status"] for key in found}
    new = rng.choice([status for status in d.statuses if had != {status}])
    for key in found:
        service.main[key]["status"] = new
        calls += service.call("PATCH", d.main, key, body={"status": new})
    return f"Set the status of all {d.main} whose {d.refers} is {name} to {new}.", None, calls


def _move_all(service: Service, rng: random.Random) -> ServiceRequest:
    """Add somebody, who takes over what another had."""
    d = service.domain
    name, _, found, calls = _of_named(service, rng)
    made = {"name": f"{rng.choice(COLORS).capitalize()} Sun", "city": rng.choice(CITIES)}
    key = f"{d.other[0]}{len(service.other) + 1}"
    service.other[key] = made
    calls += service.call("POST", d.other, body=made)
    for one in found:
        service.main[one][d.refers] = key
        calls += service.call("PATCH", d.main, one, body={d.refers: key})
    asked = f"Add {made['name']} of {made['city']} to {d.other}, and make that the {d.refers} of all"
    return f"{asked} {d.main} whose {d.refers} is {name}.", None, calls


def _other_status(service: Service, key: str, rng: random.Random) -> str:
    return rng.choice([one for one in service.domain.statuses if one != service.main[key]["status"]])


REQUESTS: Sequence[tuple[str, dict[str, DrawRequest]]] = (
    ("call", {"get": _get, "create": _create, "change": _change, "delete": _delete}),
    ("find", {"change": _change_found, "delete": _delete_found, "other": _get_other}),
    ("pages", {"count": _count, "total": _total, "largest": _largest, "delete": _delete_all}),
    ("both", {"total": _total_of, "change": _change_all, "move": _move_all}),
)

SUITE = TaskSuite(
    name="services",
    version="1",
    about="requests to a service known by its OpenAPI description",
    views=tuple(
        view("services", name, level, TOOLS, [
            Family(f"{domain}+{kind}", partial(_draw, domain, of, level))
            for domain in DOMAINS for kind, of in requests.items()
        ], LIMITS)
        for level, (name, requests) in enumerate(REQUESTS)
    ),
)  # fmt: skip
