"""Rules of gitleaks (https://github.com/gitleaks/gitleaks, MIT, revision b58d3f1), as it publishes them.

`gitleaks.toml` beside this file is their file unchanged; a newer one may take its place. Rules that name a
file's path alone, and `generic-api-key`, whose finds `patterns.assignments` weighs better, are left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import re2

from nano_shared.redact.patterns import entropy

_LEFT_OUT = frozenset({"generic-api-key"})


@dataclass(frozen=True)
class VendorRule:
    id: str
    source: str
    """RE2"""
    keywords: Sequence[str]
    """the rule is tried in a text that holds one of them, in whatever case"""
    group: int
    """that is the secret; 0: the first that matched, else the whole match"""
    entropy: float
    """lowest of a secret, bits per character"""
    allowed: Sequence[tuple[str, str]]
    """what of a match (secret, match or line) and the pattern by which it is no secret"""

    @cached_property
    def pattern(self) -> Any:
        return re2.compile(self.source)

    @cached_property
    def _allowed(self) -> list[tuple[str, Any]]:
        return [(target, re2.compile(source)) for target, source in self.allowed]

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        for match in self.pattern.finditer(text):
            group = self.group or next((n for n, g in enumerate(match.groups(), 1) if g), 0)
            secret, whole = match[group], match[0]
            if entropy(secret) < self.entropy:
                continue
            targets = {"match": whole, "line": _line(text, match.start()), "secret": secret}
            if not any(pattern.search(targets[target]) for target, pattern in self._allowed):
                yield match.span(group)


def vendor_secrets(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans of the rules' secrets, each with its rule's id; the text holds no lone surrogates."""
    rules, keywords = _rules()
    for number in sorted({rule for hit in keywords.Match(text) or () for rule in rules[hit]}):
        rule = _all()[number]
        yield from ((span, rule.id) for span in rule.find(text))


def _line(text: str, at: int) -> str:
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]


@cache
def _all() -> list[VendorRule]:
    told = tomllib.loads(files("nano_shared.redact").joinpath("gitleaks.toml").read_text(encoding="utf-8"))
    everywhere = [("secret", source) for source in told["allowlist"]["regexes"]]
    return [
        VendorRule(
            id=rule["id"], source=rule["regex"], keywords=tuple(rule["keywords"]),
            group=rule.get("secretGroup", 0), entropy=rule.get("entropy", 0.0),
            allowed=[*everywhere, *(
                (each.get("regexTarget", "secret"), source)
                for each in rule.get("allowlists", ()) for source in each.get("regexes", ())
            )],
        )
        for rule in told["rules"] if "regex" in rule and "keywords" in rule and rule["id"] not in _LEFT_OUT
    ]  # fmt: skip


@cache
def _rules() -> tuple[list[list[int]], Any]:
    """Numbers of the rules by keyword, and the search for all keywords at once."""
    options = re2.Options()
    options.case_sensitive = False
    by_keyword: dict[str, list[int]] = {}
    search = re2.Set.SearchSet(options)
    for number, rule in enumerate(_all()):
        for keyword in rule.keywords:
            by_keyword.setdefault(keyword.lower(), []).append(number)
    for keyword in by_keyword:
        search.Add(re2.escape(keyword))
    search.Compile()
    return list(by_keyword.values()), search
