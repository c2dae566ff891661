"""The viewer as one file: its answers written into the page, which loads nothing and asks nobody."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from nano_coder.verify.trainable import RefusalCode
from nano_view.answers import LogView, ViewData, plain
from nano_view.app import POLICY, asset

PageData = Mapping[str, ViewData]
"""answers by name and query, as `answer_key` spells them"""


def answer_key(name: str, query: Mapping[str, str]) -> str:
    """The key of an answer in a page; the script spells it in the same way."""
    return " ".join([name, *(f"{field}={query[field]}" for field in sorted(query))])


def write_page(path: Path, answers: PageData, *, start: str, title: str) -> None:
    """Write the page; `start` is the view that it opens with, as in "#/runs"."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(render_page(answers, start=start, title=title), encoding="utf-8", newline="\n")
    os.replace(scratch, path)


def render_page(answers: PageData, *, start: str, title: str) -> str:
    """The page as HTML. The data are JSON in which `<` is escaped, in an element that is never executed."""
    script, style = asset("view.js"), asset("view.css")
    policy = POLICY.format(script=_hash(script), style=_hash(style), connect="'none'")
    data = json.dumps(plain({"answers": answers, "start": start, "title": title})).replace("<", "\\u003c")
    page = asset("view.html")
    for old, new in (
        ("<!--policy-->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ('<link rel="stylesheet" href="view.css">', f"<style>{style}</style>"),
        (
            '<script src="view.js" defer></script>',
            f'<script type="application/json" id="data">{data}</script>',
        ),
        ("</body>", f"<script>{script}</script>\n</body>"),
    ):
        head, found, tail = page.partition(old)
        assert found, old
        page = head + new + tail
    return page


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def run_answers(view: LogView, ids: Iterable[str]) -> dict[str, ViewData]:
    """The answers about these runs: each whole, its group, and the best and worst of that side by side."""
    found: dict[str, ViewData] = {}

    def add(name: str, **query: str) -> ViewData:
        key = answer_key(name, query)
        if key not in found:
            found[key] = view.answers[name](query)
        return found[key]

    for run_id in ids:
        run = add("run", id=run_id)
        turns = list(run["turns"])
        while len(turns) < run["turn_count"]:
            turns += add("run", id=run_id, first=str(len(turns)))["turns"]
        for turn in turns:
            if turn["diff"]:
                add("text", id=run_id, part=turn["diff"])
        group = add("group", id=run["group"]["of"])
        if group["best"] != group["worst"]:
            add("pair", left=group["best"], right=group["worst"])
    return found


def log_answers(view: LogView, limit: int) -> dict[str, ViewData]:
    """The answers about the newest runs of the log, with lists of them and of their groups."""
    answer = view.runs({})
    rows = answer["rows"]
    while answer["next"] and len(rows) < limit:
        answer = view.runs({"after": json.dumps(answer["next"])})
        rows = rows + answer["rows"]
    found = run_answers(view, [row["id"] for row in rows[:limit]])
    groups = {a["group"]["of"]: a["group"] for key, a in found.items() if key.startswith("run ")}
    codes = {code: code.meaning for code in RefusalCode}
    return found | {
        answer_key("runs", {}): {**answer, "rows": rows[:limit], "next": None, "codes": codes},
        answer_key("groups", {}): {"rows": list(groups.values()), "next": None},
    }
