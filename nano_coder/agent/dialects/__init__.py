"""Dialects: how a model writes an action; one file each, parse and render as inverses."""

from nano_coder.agent.dialects.api import Api
from nano_coder.agent.dialects.compact import Compact
from nano_coder.agent.dialects.dialect import Dialect, Parsed, no_dialect
from nano_coder.agent.dialects.hermes import Hermes
from nano_coder.agent.dialects.stream import StreamParser
from nano_shared.extensions import Extensions

DIALECTS: Extensions[Dialect] = Extensions("nano.dialects", check=no_dialect)
"""by name, registered as entry points"""

__all__ = ["DIALECTS", "Api", "Compact", "Dialect", "Hermes", "Parsed", "StreamParser"]
