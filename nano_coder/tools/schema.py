"""Schemas of tools that others describe, in the words that dialects read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def object_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with what every dialect looks for: an object with properties and required ones."""
    properties = schema.get("properties")
    required = schema.get("required")
    return {
        **{key: value for key, value in schema.items() if key not in ("$schema", "$id", "title")},
        "type": "object",
        "properties": {name: _parameter(body) for name, body in properties.items()}
        if isinstance(properties, dict)
        else {},
        "required": [name for name in required if isinstance(name, str)]
        if isinstance(required, list)
        else [],
    }


def _parameter(schema: Any) -> Any:
    """A parameter's schema in the words that dialects read: an object, with one type or anyOf of several."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        return schema
    options = schema.get("anyOf")
    if isinstance(options, list):
        return {**schema, "anyOf": [_parameter(option) for option in options]}
    if isinstance(kinds := schema.get("type"), list):
        rest = {key: value for key, value in schema.items() if key != "type"}
        return {**rest, "anyOf": [{"type": kind} for kind in kinds]}
    return schema
