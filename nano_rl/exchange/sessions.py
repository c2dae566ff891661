"""The episodes of a server: bounded in number, each with an id that cannot be guessed, gone when idle."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from nano_rl.exchange.episode import Episode
from nano_shared.errors import UsageError
from nano_shared.types import Task


class TooMany(UsageError):
    """The server holds as many sessions as it may."""


class Sessions:
    """Thread-safe. `opener` makes an episode of a task."""

    def __init__(self, opener: Callable[[Task], Episode], *, most: int, idle_seconds: float) -> None:
        self._opener = opener
        self._most = most
        self._idle = idle_seconds
        self._lock = threading.Lock()
        self._episodes: dict[str, Episode] = {}
        self._busy: dict[str, threading.Lock] = {}

    def open(self, task: Task, id: str | None = None) -> str:
        """A session on a task; opening an id again gives the session there is. Raises TooMany."""
        self._sweep()
        with self._lock:
            id = id or secrets.token_urlsafe(24)
            if id not in self._episodes:
                if len(self._episodes) >= self._most:
                    raise TooMany(f"{self._most} sessions are open; close one, or serve with --sessions")
                self._episodes[id] = self._opener(task)
                self._busy[id] = threading.Lock()
            return id

    def use(self, id: str) -> tuple[Episode, threading.Lock]:
        """The episode of a session and the lock under which it is used. Raises KeyError."""
        with self._lock:
            return self._episodes[id], self._busy[id]

    def close(self, id: str) -> None:
        with self._lock:
            episode = self._episodes.pop(id, None)
            self._busy.pop(id, None)
        if episode is not None:
            episode.close()

    def close_all(self) -> None:
        for id in list(self._episodes):
            self.close(id)

    def _sweep(self) -> None:
        now = time.monotonic()
        with self._lock:
            idle = [id for id, e in self._episodes.items() if now - e.touched > self._idle]
        for id in idle:
            self.close(id)
