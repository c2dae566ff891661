"""The tools `fetch_url` and `web_search`: pages of allowed hosts, a search engine, a folder of documents."""

from __future__ import annotations

import inspect
import json
import os
from functools import cache
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from nano_coder.config import SearchSettings
from nano_coder.tools import document_index
from nano_coder.tools.document_index import DocumentIndex
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


LIBRARY = "library"
"""folder of the workspace that is searched where nothing else is configured"""
_SEARCH_DOCUMENTS = f"{inspect.getsource(document_index)}\n\nanswer()\n"
_MOST_RESULTS = 8
_LONGEST_RESULT = 800
"""characters of a result's text that are shown"""
_SECONDS = 20.0
_MOST_BYTES = 4 << 20
_TEXTS = ("content", "text", "description", "snippet", "body", "abstract")
"""what engines call a result's text"""

FoundResult = dict[str, str]
"""title, url and text"""


class SearchProvider(Protocol):
    """Where `web_search` looks."""

    def search(self, query: str, most: int) -> list[FoundResult]:
        """The best results. Raises ToolFailure where it cannot tell."""
        ...


@tool(recorded=True)
def web_search(context: ToolContext, query: str) -> ToolResult:
    """Search for documents; shows the title, place and beginning of the best. Read one with fetch_url or
    read_file."""
    if not query.strip():
        raise ToolFailure("the query is empty")
    found = _provider(context).search(query, _MOST_RESULTS)
    return ToolResult(text="\n\n".join(map(_result_text, found)) or "nothing was found")


def _provider(context: ToolContext) -> SearchProvider:
    settings = context.search or SearchSettings()
    if settings.engine is not None:
        return SearchEngine(settings)
    if settings.documents is not None:
        return _index(str(real_path(settings.documents)))
    return WorkspaceLibrary(context)


@cache
def _index(folder: str) -> DocumentIndex:
    if not os.path.isdir(folder):
        raise ToolFailure(f"search.documents = {folder!r}: no such directory")
    return DocumentIndex(folder)


class WorkspaceLibrary:
    """The folder `library` of the workspace, indexed in the jail."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context

    def search(self, query: str, most: int) -> list[FoundResult]:
        done = self._context.run_python(_SEARCH_DOCUMENTS, [LIBRARY, query, str(most)], isolated=True)
        if not done.ok:
            said = one_line(done.stderr.decode("utf-8", "replace"), 200) or "the search did not end"
            raise ToolFailure(f"{said}; the user can set search.documents or search.engine")
        try:
            found = json.loads(done.stdout)
            return [{**each, "url": f"{LIBRARY}/{each['url']}"} for each in found]
        except (ValueError, TypeError, KeyError):
            raise ToolFailure("the search gave no answer") from None


class SearchEngine:
    """An engine that answers JSON: SearXNG, or any whose results lie at a path of its answer."""

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings

    def search(self, query: str, most: int) -> list[FoundResult]:
        url = str(self._settings.engine).replace("{query}", quote(query, safe=""))
        try:
            found = json.loads(_fetched(url, self._headers()))
            for name in self._settings.results.split("."):
                found = found[name]
            return [_result(dict(each)) for each in found[:most]]
        except (httpx.HTTPError, httpx.InvalidURL) as problem:
            raise ToolFailure(f"the search engine failed: {one_line(str(problem), 200)}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ToolFailure("the search engine answered something else than results") from None

    def _headers(self) -> dict[str, str]:
        settings, headers = self._settings, {"accept": "application/json"}
        if settings.token_env_var is not None:
            key = os.environ.get(settings.token_env_var)
            if key is None:
                raise ToolFailure(f"the variable {settings.token_env_var}, which holds its key, is not set")
            bearer = settings.token_header.casefold() == "authorization"
            headers[settings.token_header] = f"Bearer {key}" if bearer else key
        return headers


def _fetched(url: str, headers: dict[str, str]) -> bytes:
    data = bytearray()
    with httpx.stream("GET", url, headers=headers, timeout=_SECONDS, follow_redirects=False) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > _MOST_BYTES:
                raise ToolFailure(f"the search engine answered more than {_MOST_BYTES >> 20} MB")
    return bytes(data)


def _result(row: dict[str, Any]) -> FoundResult:
    text = next((str(row[name]) for name in _TEXTS if row.get(name)), "")
    return {"title": str(row.get("title", "")), "url": str(row.get("url", "")), "text": text}


def _result_text(found: FoundResult) -> str:
    text = printable(found["text"], _LONGEST_RESULT)
    return f"{one_line(found['title'], 150)}\n{one_line(found['url'], 300)}\n{text}"
