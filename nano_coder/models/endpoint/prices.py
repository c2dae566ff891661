"""Prices of hosted models: the user's own, before those that the package knows."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from nano_coder.config import Price

_DATED = re.compile(r"-20\d\d-?\d\d-?\d\d$")


def find_price(model: str, own: Mapping[str, Price]) -> Price | None:
    """The price of a model, also where its name ends with the date of a version; None for an unknown one."""
    for name in dict.fromkeys((model, _DATED.sub("", model))):
        for table in (own, _shipped()):
            if name in table:
                return table[name]
    return None


@cache
def _shipped() -> Mapping[str, Price]:
    text = (files("nano_coder.models.endpoint") / "prices.toml").read_text(encoding="utf-8")
    return {name: Price.model_validate(price) for name, price in tomllib.loads(text).items()}
