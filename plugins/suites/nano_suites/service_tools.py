"""The tool `call_service`: an API in miniature that answers by its OpenAPI description.

The workspace holds the description (`openapi.json`) and the state: a file of records for each collection, and
the number of calls that will still be answered 503. Nothing is sent anywhere; equal calls on an equal state
have equal answers.
"""

from __future__ import annotations

import json
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import AliasPath, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nano_coder.tools.text_files import read_text
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_suites.record_file import Records

DESCRIPTION = "openapi.json"
OUTAGES: Records[int] = Records("service/outages.json", TypeAdapter(dict[str, int]))
ServiceRecord = dict[str, Any]
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool,
}  # fmt: skip


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Property(_Part):
    type: Literal["string", "integer", "number", "boolean"]
    enum: tuple[str, ...] | None = None
    minimum: float | None = None
    collection: str | None = Field(None, alias="x-collection")
    """the value is the id of a record there"""


class Schema(_Part):
    properties: dict[str, Property]
    required: tuple[str, ...] = ()


class Parameter(_Part):
    name: str
    place: str = Field(alias="in")


class Operation(_Part):
    parameters: tuple[Parameter, ...] = ()
    body: str | None = Field(
        None, validation_alias=AliasPath("requestBody", "content", "application/json", "schema", "$ref")
    )
    page_size: int = Field(20, alias="x-page-size", ge=1)


class Components(_Part):
    schemas: dict[str, Schema] = {}


class Description(_Part):
    """The part of an OpenAPI document that is obeyed: collections `/NAME` and their records `/NAME/{id}`."""

    paths: dict[str, dict[str, Operation]]
    components: Components = Components()


class RefusedCall(Exception):
    """An answer other than success."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(error)
        self.status = status


def records_of(collection: str) -> Records[ServiceRecord]:
    """The file that holds the records of `/collection`."""
    return Records(f"service/{collection}.json", TypeAdapter(dict[str, ServiceRecord]))


@tool(body="body", mutates=True)
def call_service(context: ToolContext, method: str, path: str, body: str = "") -> ToolResult:
    """Call the service: a method, a path with its query, and a JSON body. GET /openapi.json describes it."""
    try:
        status, answer = _answer(context, method.strip().upper(), path.strip(), body)
    except RefusedCall as refused:
        status, answer = refused.status, {"error": str(refused)}
    shown = json.dumps(answer, ensure_ascii=False) if answer is not None else ""
    return ToolResult(text=f"{status} {shown}".strip(), ok=status < 400)


def _answer(context: ToolContext, method: str, path: str, body: str) -> tuple[int, Any]:
    url = urlsplit(path)
    text = read_text(context.jail, DESCRIPTION).text
    if (method, url.path) == ("GET", f"/{DESCRIPTION}"):
        return 200, json.loads(text)
    try:
        api = Description.model_validate_json(text)
    except ValidationError as problem:
        error = problem.errors()[0]
        where = ".".join(map(str, error["loc"]))
        raise ToolFailure(f"{DESCRIPTION} describes no service: {where}: {error['msg'].lower()}") from None
    template, key = _template(api, url.path)
    if method.lower() not in api.paths[template]:
        raise RefusedCall(405, f"{method} is not allowed here; {', '.join(api.paths[template]).upper()} is")
    _refuse_while_out(context, f"{method} {template}")
    operation, collection = api.paths[template][method.lower()], template.split("/")[1]
    records = records_of(collection).load(context)
    if key is not None and key not in records:
        raise RefusedCall(404, f"there is no {key} in /{collection}")
    query = _query(operation, url.query)
    given = _body(context, operation, body, api, partial=method == "PATCH")
    if method == "GET":
        return 200, _shown(key, records[key]) if key else _page(collection, records, query, operation)
    return _change(context, method, collection, key, given)


def _change(
    context: ToolContext, method: str, collection: str, key: str | None, given: ServiceRecord
) -> tuple[int, Any]:
    store = records_of(collection)
    records = store.load(context)
    if key is None:
        key = f"{collection[0]}{1 + max(map(_number, records), default=0)}"
        records[key] = given
    elif method == "DELETE":
        del records[key]
    else:
        records[key] |= given
    store.save(context, records)
    if method == "DELETE":
        return 204, None
    return (201 if method == "POST" else 200), _shown(key, records[key])


def _number(key: str) -> int:
    """Of a record's id, a letter and a number."""
    return int(key[1:]) if key[1:].isdecimal() else 0


def _template(api: Description, path: str) -> tuple[str, str | None]:
    """The path of the description that fits, and the key of the record that it names."""
    parts = path.strip("/").split("/")
    for template in api.paths:
        named = template.strip("/").split("/")
        same = len(named) == len(parts)
        if same and all(n.startswith("{") or n == p for n, p in zip(named, parts, strict=True)):
            return template, parts[-1] if named[-1].startswith("{") else None
    raise RefusedCall(404, f"there is no path {path}; GET /{DESCRIPTION} lists those there are")


def _refuse_while_out(context: ToolContext, operation: str) -> None:
    outages = OUTAGES.load(context)
    if outages.get(operation, 0) > 0:
        outages[operation] -= 1
        OUTAGES.save(context, outages)
        raise RefusedCall(503, "unavailable for a moment; try again")


def _shown(key: str | None, record: ServiceRecord) -> ServiceRecord:
    return {"id": key, **record}


def _query(operation: Operation, text: str) -> dict[str, str]:
    known = sorted(one.name for one in operation.parameters if one.place == "query")
    query = dict(parse_qsl(text, keep_blank_values=True))
    if wrong := [name for name in query if name not in known]:
        raise RefusedCall(400, f"unknown parameter {wrong[0]}; known: {', '.join(known) or 'none'}")
    return query


def _page(
    collection: str, records: dict[str, ServiceRecord], query: dict[str, str], operation: Operation
) -> ServiceRecord:
    """The records that match the query, a page of them; `next` is the path of the next page."""
    size, text = operation.page_size, query.pop("page", "1")
    if not text.isdecimal() or (page := int(text)) < 1:
        raise RefusedCall(400, f"page: {text} is no number from 1")
    found = [
        _shown(key, record)
        for key, record in sorted(records.items(), key=lambda item: _number(item[0]))
        if all(str(record.get(name)) == value for name, value in query.items())
    ]
    more = urlencode({"page": page + 1, **query})
    follows = f"/{collection}?{more}" if len(found) > page * size else None
    return {"items": found[(page - 1) * size : page * size], "next": follows}


def _body(
    context: ToolContext, operation: Operation, text: str, api: Description, *, partial: bool
) -> ServiceRecord:
    """The body, checked by the schema that the operation names."""
    if operation.body is None:
        if text.strip():
            raise RefusedCall(400, "this operation takes no body")
        return {}
    schema = api.components.schemas[operation.body.rpartition("/")[2]]
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given:
        raise RefusedCall(400, "the body is no JSON object with values")
    missing = [] if partial else [name for name in schema.required if name not in given]
    if missing:
        raise RefusedCall(400, f"{missing[0]} is missing")
    for name, value in given.items():
        if name not in schema.properties:
            raise RefusedCall(400, f"unknown property {name}; known: {', '.join(schema.properties)}")
        _check(context, name, value, schema.properties[name])
    return given


def _check(context: ToolContext, name: str, value: Any, of: Property) -> None:
    if not isinstance(value, _TYPES[of.type]) or (isinstance(value, bool) and of.type != "boolean"):
        raise RefusedCall(400, f"{name}: {json.dumps(value)} is no {of.type}")
    if of.enum is not None and value not in of.enum:
        raise RefusedCall(400, f"{name}: {value} is none of {', '.join(of.enum)}")
    if of.minimum is not None and isinstance(value, int | float) and value < of.minimum:
        raise RefusedCall(400, f"{name}: {value} is less than {of.minimum:g}")
    if of.collection is not None and value not in records_of(of.collection).load(context):
        raise RefusedCall(409, f"{name}: there is no {value} in /{of.collection}")
