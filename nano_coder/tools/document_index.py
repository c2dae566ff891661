"""A full-text index of a folder of documents, in memory; runs here, or from its source in a jail."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys

SUFFIXES = (".md", ".txt", ".rst", ".html", ".htm", ".adoc", ".org", ".tex", ".csv", ".json", ".py", ".toml")
_LARGEST_FILE = 2_000_000
_MOST_BYTES = 200_000_000
_PASSAGE = 1500
"""characters of a passage, the unit that is found"""


class DocumentIndex:
    """The passages of the text files below a folder."""

    def __init__(self, folder: str) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.execute("CREATE VIRTUAL TABLE passages USING fts5(place, text)")
        left = _MOST_BYTES
        for path in _documents(folder):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(min(left, _LARGEST_FILE))
            left -= len(text)
            name = os.path.relpath(path, folder)
            rows = [(f"{name}:{line}", passage) for line, passage in _passages(text)]
            self._connection.executemany("INSERT INTO passages VALUES (?, ?)", rows)
            if left <= 0:
                break

    def search(self, query: str, most: int) -> list[dict[str, str]]:
        """The best passages: title, url (file and line) and text."""
        words = re.findall(r"\w+", query.casefold())[:32]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        rows = self._connection.execute(
            "SELECT place, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?", (match, most)
        ).fetchall()
        return [{"title": _title(text), "url": place, "text": text} for place, text in rows]


def _documents(folder: str) -> list[str]:
    found = []
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [os.path.join(top, name) for name in sorted(files) if name.lower().endswith(SUFFIXES)]
        found += [path for path in paths if os.path.isfile(path) and not os.path.islink(path)]
    return found


def _passages(text: str) -> list[tuple[int, str]]:
    """Passages with the line that each begins at: paragraphs, put together up to a size."""
    passages: list[tuple[int, str]] = []
    line, begun, held = 1, 1, ""
    for part in re.split(r"(\n\s*\n)", text):
        for piece in (part[at : at + _PASSAGE] for at in range(0, len(part), _PASSAGE)):
            if held.strip() and len(held) + len(piece) > _PASSAGE:
                passages.append((begun, held.strip()))
                held, begun = "", line
            held += piece
            line += piece.count("\n")
    if held.strip():
        passages.append((begun, held.strip()))
    return passages


def _title(text: str) -> str:
    return text.lstrip("#= \n").split("\n", 1)[0][:120]


def answer() -> None:
    """In a jail: the best passages of argv[1] for the query argv[2], at most argv[3], as JSON."""
    folder, query, most = sys.argv[1:]
    if not os.path.isdir(folder):
        sys.exit(f"there is no folder {folder} of documents here")
    print(json.dumps(DocumentIndex(folder).search(query, int(most))))
