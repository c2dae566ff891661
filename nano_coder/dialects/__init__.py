"""Dialects: how a model writes an action; one file each, parse and render as inverses."""

from nano_coder.dialects.compact import Compact
from nano_coder.dialects.dialect import Dialect, Parsed
from nano_coder.dialects.hermes import Hermes

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Compact(), Hermes())}

__all__ = ["DIALECTS", "Compact", "Dialect", "Hermes", "Parsed"]
