"""The OpenAPI description of a service of two collections, the second named by the records of the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ApiPart = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Domain:
    """What a service is about."""

    main: str
    """collection whose records name one of `other`"""
    other: str
    refers: str
    """property that does so"""
    label: str
    """property with a text of its own for each record"""
    amount: str
    """property with a number from 1"""
    statuses: tuple[str, ...]


def describe(domain: Domain, page: int) -> ApiPart:
    """The document, OpenAPI 3.1; lists have `page` records a page."""
    main: ApiPart = {
        domain.refers: {
            "type": "string", "description": f"id in /{domain.other}", "x-collection": domain.other,
        },
        domain.label: {"type": "string"},
        domain.amount: {"type": "integer", "minimum": 1},
        "status": {"type": "string", "enum": list(domain.statuses)},
    }  # fmt: skip
    other: ApiPart = {"name": {"type": "string"}, "city": {"type": "string"}}
    paths: ApiPart = {}
    for name, properties in ((domain.main, main), (domain.other, other)):
        paths |= _paths(name, list(properties), page)
    schemas = {
        _schema(name): {"type": "object", "properties": properties, "required": list(properties)}
        for name, properties in ((domain.main, main), (domain.other, other))
    }
    return {
        "openapi": "3.1.0", "info": {"title": domain.main, "version": "1"}, "paths": paths,
        "components": {"schemas": schemas},
    }  # fmt: skip


def _schema(collection: str) -> str:
    return collection.removesuffix("s").capitalize()


def _paths(name: str, properties: list[str], page: int) -> ApiPart:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_schema(name)}"}}}
    body = {"required": True, "content": content}
    key = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    filters = [{"name": one, "in": "query", "schema": {"type": "string"}} for one in properties]
    number = {"name": "page", "in": "query", "schema": {"type": "integer", "minimum": 1}}
    pages = f"a page of {page}, and the path of the next"
    changed = "200 400 404 409"
    return {
        f"/{name}": {
            "get": _operation(pages, "200 503", parameters=[*filters, number]) | {"x-page-size": page},
            "post": _operation("add one", "201 400 409", requestBody=body),
        },
        f"/{name}/{{id}}": {
            "get": _operation("one of them", "200 404", parameters=[key]),
            "patch": _operation("change what is given", changed, parameters=[key], requestBody=body),
            "delete": _operation("delete it", "204 404", parameters=[key]),
        },
    }  # fmt: skip


_MEANINGS = {
    "200": "done", "201": "added", "204": "deleted", "400": "the body or query is wrong",
    "404": "there is no such record", "409": "it names a record that does not exist",
    "503": "unavailable for a moment: try again",
}  # fmt: skip


def _operation(summary: str, statuses: str, **more: Any) -> ApiPart:
    responses = {status: {"description": _MEANINGS[status]} for status in statuses.split()}
    return {"summary": summary, **more, "responses": responses}
