"""The service answers by its OpenAPI description, and what it refuses changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nano_coder.sandbox.backend import open_sandbox
from nano_coder.tools.tool import ToolContext, ToolFailure
from nano_shared.types import Limits
from nano_suites.service_description import Domain, describe
from nano_suites.service_tools import DESCRIPTION, call_service, records_of

SHOP = Domain("orders", "customers", "customer", "product", "quantity", ("open", "paid"))
ORDERS = {
    f"o{n}": {"customer": "c1", "product": f"p{n}", "quantity": n, "status": "open"} for n in range(1, 6)
}
CUSTOMERS = {"c1": {"name": "Ada B", "city": "Lima"}}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[ToolContext]:
    (tmp_path / "service").mkdir()
    files = {
        DESCRIPTION: describe(SHOP, 2), "service/orders.json": ORDERS, "service/customers.json": CUSTOMERS,
        "service/outages.json": {"GET /customers": 1},
    }  # fmt: skip
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    jail = open_sandbox().open(tmp_path, Limits())
    yield ToolContext(jail=jail, limits=Limits())
    jail.close()


def say(context: ToolContext, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    text = "" if body is None else body if isinstance(body, str) else json.dumps(body)
    result = call_service(context, {"method": method, "path": path, "body": text})
    status, _, answer = result.text.partition(" ")
    assert result.ok == (int(status) < 400)
    return int(status), json.loads(answer) if answer else None


def state(context: ToolContext) -> tuple[dict[str, Any], dict[str, Any]]:
    return records_of("orders").load(context), records_of("customers").load(context)


def test_the_description_is_an_openapi_document(context: ToolContext) -> None:
    status, api = say(context, "GET", "/openapi.json")
    assert (status, api["openapi"]) == (200, "3.1.0")
    assert set(api["paths"]) == {"/orders", "/orders/{id}", "/customers", "/customers/{id}"}


def test_lists_come_in_pages_and_filtered(context: ToolContext) -> None:
    path, seen = "/orders", []
    while path:
        _, answer = say(context, "GET", path)
        seen.append([one["id"] for one in answer["items"]])
        path = answer["next"]
    assert seen == [["o1", "o2"], ["o3", "o4"], ["o5"]]
    assert [one["id"] for one in say(context, "GET", "/orders?product=p4")[1]["items"]] == ["o4"]
    assert say(context, "GET", "/orders?status=open&page=2")[1]["next"] == "/orders?page=3&status=open"


def test_records_are_read_added_changed_and_deleted(context: ToolContext) -> None:
    assert say(context, "get", "/orders/o2") == (200, {"id": "o2", **ORDERS["o2"]})
    made = {"customer": "c1", "product": "lamp", "quantity": 3, "status": "paid"}
    assert say(context, "POST", "/orders", made) == (201, {"id": "o6", **made})
    assert say(context, "PATCH", "/orders/o6", {"quantity": 4})[1]["quantity"] == 4
    assert say(context, "DELETE", "/orders/o1") == (204, None)
    orders, customers = state(context)
    assert list(orders) == ["o2", "o3", "o4", "o5", "o6"]
    assert (orders["o6"], customers) == ({**made, "quantity": 4}, CUSTOMERS)


GOOD = {"customer": "c1", "product": "lamp", "quantity": 3, "status": "paid"}


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        (("GET", "/nothing"), 404, "there is no path"),
        (("GET", "/orders/o9"), 404, "no o9"),
        (("PUT", "/orders/o1"), 405, "GET, PATCH, DELETE"),
        (("GET", "/orders?size=9"), 400, "unknown parameter size"),
        (("GET", "/orders?page=0"), 400, "no number from 1"),
        (("POST", "/orders", "{"), 400, "no JSON object"),
        (("POST", "/orders", {**GOOD, "status": "lost"}), 400, "none of open, paid"),
        (("POST", "/orders", {**GOOD, "quantity": "3"}), 400, "no integer"),
        (("POST", "/orders", {**GOOD, "quantity": True}), 400, "no integer"),
        (("POST", "/orders", {**GOOD, "quantity": 0}), 400, "less than 1"),
        (("POST", "/orders", {**GOOD, "customer": "c9"}), 409, "no c9 in /customers"),
        (("POST", "/orders", {"customer": "c1"}), 400, "product is missing"),
        (("PATCH", "/orders/o1", {"colour": "red"}), 400, "unknown property colour"),
        (("DELETE", "/orders/o1", {"really": "yes"}), 400, "no body"),
    ],
)
def test_what_is_wrong_is_refused_with_a_reason(
    context: ToolContext, call: tuple[Any, ...], status: int, error: str
) -> None:
    found, answer = say(context, *call)
    assert found == status
    assert error in answer["error"]
    assert state(context) == (ORDERS, CUSTOMERS)


def test_an_outage_ends_after_so_many_calls(context: ToolContext) -> None:
    assert [say(context, "GET", "/customers")[0] for _ in range(3)] == [503, 200, 200]


def test_a_description_that_is_none_is_told(context: ToolContext) -> None:
    context.jail.write(DESCRIPTION, b'{"paths": 3}')
    with pytest.raises(ToolFailure, match=r"openapi\.json describes no service: paths"):
        say(context, "GET", "/orders")
