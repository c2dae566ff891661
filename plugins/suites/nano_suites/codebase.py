"""The suite `long`: packages of up to thirty modules, and a change that touches up to seven of them.

The other modules hold names that only begin alike. All files are checked: a change too many fails as one too
few.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_shared.types import Limits, OracleAction
from nano_suites.family import WORDS, Family, act, left, view

TOOLS = ("search", "read_file", "edit_file", "submit")
LIMITS = Limits(max_turns=48, max_tokens=8192)
SIZES = ((6, 2), (12, 4), (20, 5), (30, 7))
"""(modules, of which so many change) of each level"""


@dataclass(frozen=True, slots=True)
class WideChange:
    """A change of one name or value, with what defines it, what uses it, and what only looks like it."""

    home: str
    """module of the definition, `{o}` in place of what changes"""
    use: str
    """lines of a module that uses it; `{w}` is a word of its own"""
    other: str
    """lines of a module that does not"""
    names: tuple[tuple[str, str], ...]
    """(old, new)"""
    prompt: str


_STORE = '"""Reads and writes."""\n\nimport json\n\n\n'
CHANGES = {
    "function": WideChange(
        _STORE + "def {o}(path):\n    with open(path) as file:\n        return json.load(file)\n",
        "from app.{m} import {o}\n\n\ndef {w}_count(path):\n    return len({o}(path))\n",
        "from app.extra import {o}_fast\n\n\ndef {w}_count(path):\n    return len({o}_fast(path))\n",
        (("load_rows", "read_rows"), ("get_items", "fetch_items"), ("load", "read_json")),
        "Rename the function {o} of app/{m}.py to {n}, there and wherever it is used.",
    ),
    "constant": WideChange(
        '"""Limits."""\n\n{o} = 250\n{o}_PER_DAY = 5000\n',
        "from app.{m} import {o}\n\n\ndef {w}_allowed(count):\n    return count <= {o}\n",
        "from app.{m} import {o}_PER_DAY\n\n\ndef {w}_allowed(count):\n    return count <= {o}_PER_DAY\n",
        (("MAX_ROWS", "ROW_LIMIT"), ("QUOTA", "ALLOWANCE"), ("TOP", "CEILING")),
        "Rename the constant {o} of app/{m}.py to {n}, there and wherever it is used.",
    ),
    "class": WideChange(
        '"""Accounts."""\n\n\nclass {o}:\n    def __init__(self, total=0):\n        self.total = total\n',
        "from app.{m} import {o}\n\n\ndef new_{w}(total):\n    return {o}(total)\n",
        "class {o}View:\n    title = '{w}'\n\n\ndef new_{w}():\n    return {o}View()\n",
        (("Ledger", "Account"), ("Basket", "Cart"), ("Ticket", "Issue")),
        "Rename the class {o} of app/{m}.py to {n}, there and wherever it is used.",
    ),
    "keyword": WideChange(
        '"""Pages."""\n\n\ndef pages(rows, {o}=20):\n    return [rows[:{o}]]\n',
        "from app.{m} import pages\n\n\ndef {w}_pages(rows):\n    return pages(rows, {o}={k})\n",
        "def {w}_pages(rows):\n    return cut(rows, {o}={k})\n\n\ndef cut(rows, {o}):\n    pass\n",
        (("limit", "size"), ("most", "per_page"), ("count", "length")),
        "Rename the parameter {o} of the function pages in app/{m}.py to {n}, there and in every call of"
        " pages."
        " Other functions keep theirs.",
    ),
    "value": WideChange(
        '"""Requests."""\n\n\ndef fetch(url, timeout):\n    return url, timeout, "{o}"\n',
        "from app.{m} import fetch\n\n\ndef {w}_page(url):\n    return fetch(url, timeout={k}), '{o}'\n",
        "def {w}_page(url):\n    return url, '{o}-beta'\n",
        (("v1", "v2"), ("utf-8", "latin-1"), ("public", "internal")),
        "The value '{o}' becomes '{n}' in app/{m}.py and in every module that calls its function fetch, and"
        " nowhere else.",
    ),
}  # fmt: skip


def _draw(name: str, level: int, rng: random.Random) -> Made:
    change, (size, touched) = CHANGES[name], SIZES[level]
    old, new = rng.choice(change.names)
    home, *modules = rng.sample(WORDS, size)
    fill = {"o": old, "n": new, "m": home}
    files = {f"app/{home}.py": change.home.format(**fill)}
    for number, word in enumerate(modules):
        text = (change.use if number < touched - 1 else change.other).format(
            w=word, k=rng.randint(2, 99), **fill
        )
        files[f"app/{word}.py"] = f'"""The {word} page."""\n\n{text}'
    after = dict(files)
    for path in list(files)[:touched]:
        after[path] = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-])", new, files[path])
    paths = sorted(files)
    checks = [StateCheck(kind="text", path=path, expected=after[path]) for path in paths]
    edits = [edit for path in paths for edit in _edits(path, files[path], after[path])]
    shown = {path: files[path] for path in paths}
    return left(change.prompt.format(**fill), shown, checks, act("search", pattern=rf"\b{old}\b"), *edits)


def _edits(path: str, before: str, after: str) -> list[OracleAction]:
    pairs = zip(before.split("\n"), after.split("\n"), strict=True)
    return [
        act("edit_file", path=path, line=number, new=new)
        for number, (old, new) in enumerate(pairs, 1)
        if old != new
    ]


SUITE = TaskSuite(
    name="long",
    version="1",
    about="a change in up to seven of up to thirty modules",
    views=tuple(
        view("long", f"of_{size}", level, TOOLS, [
            Family(name, partial(_draw, name, level)) for name in CHANGES
        ], LIMITS)
        for level, (size, _) in enumerate(SIZES)
    ),
)  # fmt: skip
