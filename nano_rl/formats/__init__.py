"""Tasks in the formats of others: one module a format, registered in one dictionary."""

from nano_rl.formats.formats import FORMATS, find_format, guess_format
from nano_shared.refusal import Refusal, Refused

__all__ = ["FORMATS", "Refusal", "Refused", "find_format", "guess_format"]
