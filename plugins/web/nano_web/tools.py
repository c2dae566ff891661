"""The tools `fetch_url` and `web_search`: pages of allowed hosts, a search engine, a folder of documents."""

from __future__ import annotations

import inspect
import json
import os
import re
import sqlite3
from functools import cache
from typing import Any
from urllib.parse import quote

import httpx

from nano_coder.config import SearchSettings
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.files import real_path
from nano_shared.printable import one_line, printable, terminal_text

# the jail's only way out is the proxy, which checks the host of every request and redirection
_FETCH = r"""
import html.parser, sys, urllib.error, urllib.request

MOST_BYTES = 5_000_000
SKIPPED = {"script", "style", "noscript", "template", "svg", "head"}
BREAKS = set("p div br li tr h1 h2 h3 h4 h5 h6 pre section article table".split())


class Text(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts, self.skipped, self.title = [], 0, None

    def handle_starttag(self, tag, attributes):
        self.skipped += tag in SKIPPED
        if tag in BREAKS:
            self.parts.append("\n")
        href = dict(attributes).get("href")
        if tag == "a" and href and href.startswith("http"):
            self.parts.append(f"[{href}] ")

    def handle_endtag(self, tag):
        if tag in SKIPPED and self.skipped:
            self.skipped -= 1
        if tag in BREAKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.skipped:
            self.parts.append(" ".join(data.split()) + (" " if data[-1:].isspace() else ""))


def shown(data, kind, charset):
    text = data.decode(charset, "replace")
    if "html" not in kind:
        return text
    parser = Text()
    parser.feed(text)
    lines = (line.strip() for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


url = sys.argv[1]
headers = {"User-Agent": "nano-coder", "Accept": "text/*, application/json"}
request = urllib.request.Request(url, headers=headers)
try:
    with urllib.request.urlopen(request, timeout=30) as answer:
        kind, charset = answer.headers.get_content_type(), answer.headers.get_content_charset() or "utf-8"
        data = answer.read(MOST_BYTES + 1)
        place = answer.geturl()
except urllib.error.HTTPError as problem:
    sys.exit(f"{url} answered {problem.code} {problem.reason}")
except (OSError, ValueError) as problem:
    sys.exit(f"{url} cannot be read: {getattr(problem, 'reason', problem)}")
if not (kind.startswith("text/") or kind.endswith(("json", "xml", "javascript", "yaml"))):
    sys.exit(f"{url} is {kind}, {len(data)} bytes, and no text")
try:
    text = shown(data[:MOST_BYTES], kind, charset)
except LookupError:
    text = shown(data[:MOST_BYTES], kind, "utf-8")
if place != url:
    print(f"[redirected to {place}]")
sys.stdout.buffer.write(text.encode("utf-8", "replace"))
if len(data) > MOST_BYTES:
    print(f"\n[only the first {MOST_BYTES} bytes]")
"""


@tool(recorded=True)
def fetch_url(context: ToolContext, url: str) -> ToolResult:
    """Read a web page or file as text. Only hosts that the user allowed can be reached."""
    if not url.startswith(("http://", "https://")):
        raise ToolFailure(f"{one_line(url, 100)!r} is no address; it begins with http:// or https://")
    if context.network == "none":
        raise ToolFailure("no host can be reached: the user has not allowed any (--net allow=HOST)")
    done = context.run_python(_FETCH, [url], isolated=True)
    text = printable(terminal_text(done.stdout.decode("utf-8", "replace")), None)
    if not done.ok:
        said = "it took too long" if done.timed_out else one_line(done.stderr.decode("utf-8", "replace"), 300)
        hosts = context.network.removeprefix("allow=")
        return ToolResult(text=f"error: {said} (allowed: {hosts})", ok=False, execution=done)
    return ToolResult(text=text or "[no text]", execution=done)


# ------------------------------------------------------------------------------- a folder of documents

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


# an index in a jail: the best passages of argv[1] for the query argv[2], at most argv[3], as JSON
_SEARCH_DOCUMENTS = f"""
import json, os, re, sqlite3, sys

SUFFIXES, _PASSAGE, _LARGEST_FILE, _MOST_BYTES = {SUFFIXES}, {_PASSAGE}, {_LARGEST_FILE}, {_MOST_BYTES}


{"".join(map(inspect.getsource, (DocumentIndex, _documents, _passages, _title)))}

folder, query, most = sys.argv[1:]
if not os.path.isdir(folder):
    sys.exit(f"there is no folder {{folder}} of documents here")
print(json.dumps(DocumentIndex(folder).search(query, int(most))))
"""

# ------------------------------------------------------------------------------------------- the search

LIBRARY = "library"
"""folder of the workspace that is searched where nothing else is configured"""
_MOST_RESULTS = 8
_LONGEST_RESULT = 800
"""characters of a result's text that are shown"""
_SECONDS = 20.0
_LARGEST_ANSWER = 4 << 20
_TEXTS = ("content", "text", "description", "snippet", "body", "abstract")
"""what engines call a result's text"""

FoundResult = dict[str, str]
"""title, url and text"""


@tool(recorded=True)
def web_search(context: ToolContext, query: str) -> ToolResult:
    """Search for documents; shows the title, place and beginning of the best. Read one with fetch_url or
    read_file."""
    if not query.strip():
        raise ToolFailure("the query is empty")
    settings = context.search or SearchSettings()
    if settings.engine is not None:
        found = _by_engine(settings, query)
    elif settings.documents is not None:
        found = _index(str(real_path(settings.documents))).search(query, _MOST_RESULTS)
    else:
        found = _in_library(context, query)
    return ToolResult(text="\n\n".join(map(_result_text, found)) or "nothing was found")


@cache
def _index(folder: str) -> DocumentIndex:
    if not os.path.isdir(folder):
        raise ToolFailure(f"search.documents = {folder!r}: no such directory")
    return DocumentIndex(folder)


def _in_library(context: ToolContext, query: str) -> list[FoundResult]:
    """In the folder `library` of the workspace, indexed in the jail."""
    done = context.run_python(_SEARCH_DOCUMENTS, [LIBRARY, query, str(_MOST_RESULTS)], isolated=True)
    if not done.ok:
        said = one_line(done.stderr.decode("utf-8", "replace"), 200) or "the search did not end"
        raise ToolFailure(f"{said}; the user can set search.documents or search.engine")
    try:
        return [{**each, "url": f"{LIBRARY}/{each['url']}"} for each in json.loads(done.stdout)]
    except (ValueError, TypeError, KeyError):
        raise ToolFailure("the search gave no answer") from None


def _by_engine(settings: SearchSettings, query: str) -> list[FoundResult]:
    """Of an engine that answers JSON: SearXNG, or any whose results lie at a path of its answer."""
    url, headers = (
        str(settings.engine).replace("{query}", quote(query, safe="")),
        {"accept": "application/json"},
    )
    if settings.token_env_var is not None:
        key = os.environ.get(settings.token_env_var)
        if key is None:
            raise ToolFailure(f"the variable {settings.token_env_var}, which holds its key, is not set")
        bearer = settings.token_header.casefold() == "authorization"
        headers[settings.token_header] = f"Bearer {key}" if bearer else key
    try:
        found = json.loads(_fetched(url, headers))
        for name in settings.results.split("."):
            found = found[name]
        return [_result(dict(each)) for each in found[:_MOST_RESULTS]]
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        raise ToolFailure(f"the search engine failed: {one_line(str(problem), 200)}") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ToolFailure("the search engine answered something else than results") from None


def _fetched(url: str, headers: dict[str, str]) -> bytes:
    data = bytearray()
    with httpx.stream("GET", url, headers=headers, timeout=_SECONDS, follow_redirects=False) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > _LARGEST_ANSWER:
                raise ToolFailure(f"the search engine answered more than {_LARGEST_ANSWER >> 20} MB")
    return bytes(data)


def _result(row: dict[str, Any]) -> FoundResult:
    text = next((str(row[name]) for name in _TEXTS if row.get(name)), "")
    return {"title": str(row.get("title", "")), "url": str(row.get("url", "")), "text": text}


def _result_text(found: FoundResult) -> str:
    text = printable(found["text"], _LONGEST_RESULT)
    return f"{one_line(found['title'], 150)}\n{one_line(found['url'], 300)}\n{text}"
