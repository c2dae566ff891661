"""HTTP to an environment behind a URL: bounded, retried where that is safe, with errors of one type."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import httpx
import tenacity

from nano_shared.errors import EnvironmentFailed, UsageError
from nano_shared.printable import one_line
from nano_shared.types import ToolSpec

LARGEST = 16 << 20
"""bytes of an answer"""
CONNECT_SECONDS = 5.0
ATTEMPTS = 4
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""the server got nothing, so any request may be sent again"""
_BUSY = (429, 502, 503, 504)


class _Busy(Exception):
    """The server is at its limit, or behind a proxy that does not reach it."""


def tries(*kinds: type[Exception]) -> tenacity.Retrying:
    """A few attempts within some seconds, for failures of these kinds; the last failure is raised."""
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS), wait=tenacity.wait_exponential(0.2, max=2),
        retry=tenacity.retry_if_exception_type(kinds), reraise=True,
    )  # fmt: skip


def checked_url(url: str, token_env_var: str | None) -> tuple[str, dict[str, str]]:
    """A URL without its last slash, and the headers of each request. Raises UsageError."""
    if not url.startswith(("http://", "https://")) or not httpx.URL(url).host:
        raise UsageError(f"{url!r} is no URL of an environment; it begins with http:// or https://")
    if token_env_var is None:
        return url.rstrip("/"), {}
    if token_env_var not in os.environ:
        raise UsageError(f"token_env_var={token_env_var}: that variable is not set")
    return url.rstrip("/"), {"Authorization": f"Bearer {os.environ[token_env_var]}"}


class HttpConnection:
    """Requests to one server, with the cookies of one session. One thread at a time."""

    def __init__(self, url: str, headers: Mapping[str, str], seconds: float) -> None:
        """`seconds` is the time-out of one request."""
        self.url = url
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        self._client = httpx.Client(headers=dict(headers), timeout=timeout)

    def get(self, path: str) -> tuple[int, str]:
        return self.ask("GET", path, again=True)

    def post(self, path: str, body: Any, *, again: bool = False) -> tuple[int, str]:
        """`again`: the request may be repeated although it may have been served."""
        return self.ask("POST", path, body, again=again)

    def ask(self, method: str, path: str, body: Any = None, *, again: bool) -> tuple[int, str]:
        """The status and the text of the answer. Raises EnvironmentFailed with the host and the way out."""
        kinds = (httpx.TransportError, _Busy) if again else _UNSENT
        try:
            return tries(*kinds)(self._once, method, path, body, again)
        except httpx.TransportError as problem:
            raise EnvironmentFailed(
                f"{self.url}{path} cannot be reached ({_said(problem)}); start that server, or name another"
            ) from None
        except (_Busy, httpx.HTTPError) as problem:
            raise EnvironmentFailed(f"{self.url}{path} failed: {_said(problem)}") from None

    def close(self) -> None:
        self._client.close()

    def _once(self, method: str, path: str, body: Any, again: bool) -> tuple[int, str]:
        with self._client.stream(method, f"{self.url}{path}", json=body) as response:
            data = bytearray()
            for part in response.iter_bytes():
                data += part
                if len(data) > LARGEST:
                    raise EnvironmentFailed(f"{self.url}{path} answers more than {LARGEST >> 20} MB")
            text = data.decode("utf-8", "replace")
            if again and response.status_code in _BUSY:
                raise _Busy(f"status {response.status_code}: {one_line(text, 200)}")
            return response.status_code, text


def object_of(url: str, status: int, text: str) -> dict[str, Any]:
    """The JSON object of an answer. Raises EnvironmentFailed for another status, and what is none."""
    if status >= 400:
        raise EnvironmentFailed(f"{url} answered {status}: {one_line(text, 300)}")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EnvironmentFailed(f"{url} answered no JSON object but {one_line(text, 100)!r}")
    return value


def specs_of(listed: Any, *schema: str) -> list[ToolSpec]:
    """Tools as a server lists them, with their JSON schema under one of these names."""
    return [
        ToolSpec(
            name=tool["name"], description=tool.get("description") or "",
            parameters=next(filter(None, map(tool.get, schema)), {}),
        )
        for tool in listed or ()
    ]  # fmt: skip


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
