"""One HTTP exchange with an endpoint: the request, and its answer as events or as a whole, bounded in size
and time."""

from __future__ import annotations

import codecs
import email.utils
import json
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from nano_shared.errors import BudgetExhausted, PolicyError

MOST_BYTES = 16 << 20
"""largest answer, bytes"""
_RETRIED_STATUS = frozenset({408, 409, 425, 429})
_NAMED_STATUS = (
    ("quota|billing|rate.?limit|too.many", 429), ("auth|api.?key", 401), ("permission", 403),
    ("not.?found", 404), ("invalid|bad.?request|unsupported|context", 400),
    ("overload|unavailable|server|timeout|internal|capacity", 503),
)  # fmt: skip
"""what errors without a number mean by their code or type"""
DONE: dict[str, Any] = {}
"""stands for [DONE], by identity"""
_MOST_LINES = 1000
"""of an event"""
_CHUNK = bytes | Exception | None
_LOOK_SECONDS = 0.1
"""seconds between two checks whether an answer is still wanted"""
Wanted = Callable[[], bool]


Failing = Literal["unreachable", "busy", "late", "refused", "garbled"]


class _NoAnswer(Exception):
    def __init__(
        self, detail: str, kind: Failing, *, status: int | None = None, after: float | None = None
    ) -> None:
        """`status` of the answer that refused, and the seconds that it asks to wait, if there are any."""
        super().__init__(detail)
        self.kind, self.status, self.after = kind, status, after


class EndpointError(_NoAnswer, PolicyError):
    """An endpoint gave no usable answer; `kind` says why."""


class PassingFailure(_NoAnswer):
    """A temporary failure: the call may be repeated."""


class Cancelled(Exception):
    """The request was cancelled."""


class RefusedRequest(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        try:
            answer = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        answer = answer[0] if isinstance(answer, list) and answer else answer
        error = answer.get("error", answer) if isinstance(answer, dict) else {}
        return error if isinstance(error, dict) else {"message": str(error)}

    @property
    def message(self) -> str:
        said = self.error.get("message") or self.error.get("detail")
        return said if isinstance(said, str) else self.body.decode("utf-8", "replace")

    @property
    def excerpt(self) -> str:
        return excerpt(self.message, 300)


class Exchange:
    """An HTTP client for one URL. Thread-safe."""

    def __init__(self, url: str, api_key: str | None, *, stall_seconds: float, answer_seconds: float) -> None:
        """`stall_seconds`: longest time without a byte; `answer_seconds`: longest time of an answer."""
        self.url = url
        self.reached = False
        """whether the server has ever answered"""
        self._stall = stall_seconds
        self._longest = answer_seconds
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(stall_seconds, connect=10.0))
        self.close = weakref.finalize(self, self._client.close)

    def events(
        self,
        body: Mapping[str, Any],
        deadline: float,
        headers: Mapping[str, str] | None = None,
        wanted: Wanted | None = None,
    ) -> Iterator[dict[str, Any]]:
        """POST the body. Yields the events of a stream, or the whole answer of a server that does not stream.

        Raises RefusedRequest for an error status, PassingFailure for a temporary failure, EndpointError for
        an invalid answer, BudgetExhausted if the deadline (monotonic) passes, and Cancelled if the answer is
        no longer `wanted`."""
        given_up = threading.Event()
        until = min(deadline, time.monotonic() + self._longest)
        answer = _Answer(self.url, self._stall, until, deadline, wanted)
        # httpx bounds single reads; a thread that is abandoned bounds the sum, name resolution included
        sending = (body, headers or {}, answer.chunks, given_up)
        threading.Thread(target=self._read, args=sending, daemon=True).start()
        try:
            yield from self._events(answer)
        finally:
            given_up.set()

    def _events(self, answer: _Answer) -> Iterator[dict[str, Any]]:
        first = answer.next(flowing=False)
        assert isinstance(first, httpx.Response)
        self.reached = True
        rest = answer.body()
        if not first.is_success:
            raise _refused(RefusedRequest(first.status_code, b"".join(rest)), first.headers)
        if "text/event-stream" in first.headers.get("content-type", ""):
            yield from _server_events(rest)
        else:
            yield from _whole(b"".join(rest), self.url)

    def _read(
        self,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        chunks: queue.SimpleQueue[httpx.Response | _CHUNK],
        given_up: threading.Event,
    ) -> None:
        try:
            with self._client.stream("POST", self.url, json=body, headers=headers) as response:
                chunks.put(response)
                for chunk in response.iter_bytes():
                    chunks.put(chunk)
                    if given_up.is_set():
                        return
            chunks.put(None)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            chunks.put(PassingFailure(str(error) or type(error).__name__, "unreachable"))
        except httpx.TimeoutException:
            chunks.put(PassingFailure(f"not a byte for {self._stall:g} s", "late"))
        except (httpx.RemoteProtocolError, httpx.NetworkError) as error:
            chunks.put(PassingFailure(f"the answer was cut: {error}", "busy"))
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError: the client was closed meanwhile
            message = f"no answer from {self.url}: {error or type(error).__name__}"
            chunks.put(EndpointError(message, "unreachable"))


@dataclass(slots=True)
class _Answer:
    """An answer as it comes from the thread that reads: its head, its body in pieces, and None at the end."""

    url: str
    stall: float
    until: float
    """when the answer must be whole, on the monotonic clock"""
    deadline: float
    """of the run, likewise"""
    wanted: Wanted | None
    chunks: queue.SimpleQueue[httpx.Response | _CHUNK] = field(default_factory=queue.SimpleQueue)

    def body(self) -> Iterator[bytes]:
        size = 0
        start = b""
        while (chunk := self.next(flowing=size > 0)) is not None:
            assert isinstance(chunk, bytes)
            size += len(chunk)
            start += chunk[: 400 - len(start)]
            if size > MOST_BYTES:
                raise EndpointError(
                    f"{self.url} answered more than {MOST_BYTES >> 20} MB, of which the rest was not"
                    f" read: {excerpt(start.decode('utf-8', 'replace'))}; see the server's log",
                    "garbled",
                )
            yield chunk

    def next(self, *, flowing: bool) -> httpx.Response | bytes | None:
        left = self.until - time.monotonic()
        try:
            chunk = self._waited(max(0.0, min(left, self.stall)))
        except queue.Empty:
            if left > self.stall:
                raise PassingFailure(f"not a byte for {self.stall:g} s", "late") from None
            if flowing and self.until == self.deadline:
                raise BudgetExhausted("the time of the run ended while the model answered") from None
            raise PassingFailure("no whole answer in time", "late") from None
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def _waited(self, seconds: float) -> httpx.Response | _CHUNK:
        """Raises queue.Empty after so many seconds, Cancelled if the answer is not wanted any more."""
        if self.wanted is not None and not self.wanted():
            raise Cancelled
        until = time.monotonic() + seconds
        while self.wanted is not None and (left := until - time.monotonic()) > _LOOK_SECONDS:
            with suppress(queue.Empty):
                return self.chunks.get(timeout=min(left, _LOOK_SECONDS))
            if not self.wanted():
                raise Cancelled
        return self.chunks.get(timeout=max(0.0, until - time.monotonic()))


def _refused(refusal: RefusedRequest, headers: Mapping[str, str]) -> Exception:
    """The exception for an error status. A used-up quota is no temporary failure."""
    passing = refusal.status >= 500 or refusal.status in _RETRIED_STATUS
    passing = passing and "image input is not supported" not in refusal.message  # llama.cpp's 500
    if not passing or "insufficient_quota" in (refusal.error.get("code"), refusal.error.get("type")):
        return refusal
    said = f"answered {refusal.status}: {refusal.excerpt}"
    after = _retry_after(headers.get("retry-after"))
    return PassingFailure(said, "busy", status=refusal.status, after=after)


def _retry_after(text: str | None) -> float | None:
    """Seconds to wait, of a number or an HTTP date (RFC 9110, section 10.2.3); None for anything else."""
    if not text:
        return None
    with suppress(ValueError, OverflowError):
        seconds = float(text)
        return max(0.0, seconds) if seconds < 1e9 else None
    with suppress(ValueError, TypeError, OverflowError, IndexError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _whole(data: bytes, url: str) -> Iterator[dict[str, Any]]:
    """The answer of a server that does not stream, or of one that does not say so."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PassingFailure(f"the answer is no UTF-8 text ({error})", "garbled") from None
    if text.lstrip().startswith(("data:", "event:", ":")):
        yield from _server_events(iter([data]))
        return
    value: Any = None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        if '"choices"' in text:  # a connection that is closed at the end says nothing of the answer's size
            raise PassingFailure("the answer was cut off before its end", "garbled") from None
    except (ValueError, RecursionError):
        pass
    if not isinstance(value, dict):
        raise not_a_completion(url, text)
    yield _checked(value)


def _server_events(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; DONE at [DONE], which ends it.

    An event is told as soon as its lines are JSON: not every server ends one by an empty line."""
    lines: list[bytes] = []
    for raw in _lines(chunks):
        line = raw.strip()
        if line.startswith(b"data:") or (line.startswith(b"{") and not lines):
            lines.append(line.removeprefix(b"data:").strip())
        elif line or not any(lines):
            continue  # comments that keep the connection alive, names of events
        data = b"\n".join(lines).strip()
        if data == b"[DONE]":
            yield DONE
            return
        if data and ((event := _event(data)) is not None):
            yield _checked(event)
            lines.clear()
        elif not data:
            lines.clear()
        elif not line or len(lines) > _MOST_LINES:
            raise PassingFailure(f"an event of the answer is no JSON text: {data[:80]!r}", "garbled")


def _event(data: bytes) -> dict[str, Any] | None:
    """None for what is no JSON object, or not yet."""
    if not data.endswith((b"}", b"]")):
        return None
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """The object, unless it is an error that came with status 200. Raises what it stands for."""
    said = answer.get("message") or answer.get("detail")
    if answer.get("error") or answer.get("object") == "error" or (said and "choices" not in answer):
        raise error_inside(answer)
    return answer


def error_inside(answer: Mapping[str, Any]) -> Exception:
    """The exception for an error in an answer whose status was 200; one without a code is asked again a few
    times."""
    error = answer.get("error") or answer
    said = error if isinstance(error, Mapping) else {}
    codes = [str(said.get(name, "")) for name in ("code", "status", "status_code", "type")]
    status = next((int(code) for code in codes if re.fullmatch("[45][0-9][0-9]", code)), None)
    for pattern, meant in _NAMED_STATUS if status is None else ():
        if re.search(pattern, " ".join(codes), re.IGNORECASE):
            status = meant
            break
    refusal = RefusedRequest(status or 500, json.dumps(answer).encode())
    if status is None:
        return PassingFailure(f"answered an error: {refusal.excerpt}", "garbled")
    return _refused(refusal, {})


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends and without a byte order mark; the last counts only if it is whole, as its end
    may be missing."""
    parts: list[bytes] = []
    first_line = True
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        parts.append(first)
        for part in more:
            line = b"".join(parts)
            yield line.removeprefix(codecs.BOM_UTF8) if first_line else line
            parts, first_line = [part], False
    if (last := b"".join(parts)).strip().endswith((b"}", b"]")):
        yield last.removeprefix(codecs.BOM_UTF8) if first_line else last


def not_a_completion(url: str, text: str) -> EndpointError:
    return EndpointError(
        f"{url} answered something else than a chat completion: {excerpt(text)};"
        " --base-url must end where /chat/completions begins, usually in /v1",
        "garbled",
    )


def excerpt(text: str, length: int = 200) -> str:
    return repr(text if len(text) <= length else text[:length] + "...")
