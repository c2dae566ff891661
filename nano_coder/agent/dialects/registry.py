"""The installed dialects: entry points of `nano.dialects`."""

from __future__ import annotations

from nano_coder.agent.dialects.dialect import Dialect, no_dialect
from nano_shared.extensions import Extensions

DIALECTS: Extensions[Dialect] = Extensions("nano.dialects", check=no_dialect)
"""by name"""
