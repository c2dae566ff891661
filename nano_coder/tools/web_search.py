"""The tool `web_search`: asks a search engine, or an index over a folder of documents."""

from __future__ import annotations

import inspect
import json
import os
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from nano_coder.config import SearchSettings
from nano_coder.tools import document_index
from nano_coder.tools.document_index import DocumentIndex
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.printable import one_line, printable

LIBRARY = "library"
"""folder of the workspace that is searched where nothing else is configured"""
_PROGRAM = f"{inspect.getsource(document_index)}\n\nanswer()\n"
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


@tool(recorded="forks")
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
        return _index(os.path.realpath(Path(settings.documents).expanduser()))
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
        done = self._context.run_python(_PROGRAM, [LIBRARY, query, str(most)], isolated=True)
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
