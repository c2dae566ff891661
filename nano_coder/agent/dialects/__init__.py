"""Dialects: how a model writes an action; one file each, parse and render as inverses."""

from nano_coder.agent.dialects.compact import Compact
from nano_coder.agent.dialects.dialect import Dialect, Parsed
from nano_coder.agent.dialects.hermes import Hermes

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (Compact(), Hermes())}

__all__ = ["DIALECTS", "Compact", "Dialect", "Hermes", "Parsed"]
