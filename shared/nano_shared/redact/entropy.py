"""Strings that look drawn at random: keys of kinds that no pattern knows."""

from __future__ import annotations

import math
import re
from collections import Counter

_CANDIDATE = re.compile(r"(?<![A-Za-z0-9/_=.])[A-Za-z0-9][A-Za-z0-9+/_\-]{23,199}={0,2}(?![A-Za-z0-9+/_=\-])")
_HASH_BEFORE = re.compile(
    r"(?:sha(?:1|224|256|384|512)|md5|blake2[bs]|h1|integrity|base64)[\-:=,\"' ]+$", re.I
)
_LOWER_RUN = re.compile(r"[a-z]{7}|[A-Z]{7}")
BITS = 4.1
"""bits a character at least; 24 characters drawn from 64 have 4.3 on average, English identifiers under 4"""
_AT_LEAST_EACH = 3


def random_looking(text: str) -> list[tuple[int, int]]:
    """Where such strings lie: 24 to 200 characters of base 64 or its URL form, of three classes of
    characters, at least three of each, no seven letters of one case in a row, and 4.1 bits a character.

    Hexadecimal is never one: commits and checksums look the same as keys. So are no words joined by dashes
    or slashes, and nothing that stands behind the name of a hash.
    """
    return [
        match.span()
        for match in _CANDIDATE.finditer(text)
        if _mixed(match[0])
        and entropy(match[0]) >= BITS
        and not _HASH_BEFORE.search(text[max(0, match.start() - 12) : match.start()])
    ]


def entropy(text: str) -> float:
    """Shannon entropy of the characters, in bits a character."""
    counts = Counter(text).values()
    return -sum(n / len(text) * math.log2(n / len(text)) for n in counts)


def _mixed(text: str) -> bool:
    classes = (sum(map(str.islower, text)), sum(map(str.isupper, text)), sum(map(str.isdigit, text)))
    separators = sum(c in "/-_+" for c in text)
    return min(classes) >= _AT_LEAST_EACH and separators * 6 <= len(text) and _LOWER_RUN.search(text) is None
