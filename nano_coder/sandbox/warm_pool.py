"""The pool of warm jails: single-use jails, created in advance by a launcher process without secrets.

Nothing of a task enters a jail before it is taken, and a used jail is not returned. All callers of this
process with the same root plan share one pool.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections import deque
from typing import Any

from nano_coder.sandbox.launcher_process import JailProcess, Launcher
from nano_shared.errors import SandboxError

SIZE = min(2 * (os.cpu_count() or 1), 16)
JAILS_A_LAUNCHER = 10_000
"""jails after which a launcher is replaced"""
_NICE = 10
_CALM_S = 0.01

_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


class Pool:
    """Keeps `size` jails of one root ready, from the second request on."""

    def __init__(self, spec: dict[str, Any], room: dict[str, int], size: int = SIZE) -> None:
        self._spec = spec
        self._room = room
        self.size = size
        self._ready: deque[JailProcess] = deque()
        self._changed = threading.Condition()
        self._launcher: Launcher | None = None
        self._launcher_lock = threading.Lock()
        self._retired: list[Launcher] = []
        self._refill: threading.Thread | None = None
        self.closed = False
        self._taken = 0

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self) -> list[JailProcess]:
        """The jails that wait."""
        return list(self._ready)

    def take(self) -> JailProcess:
        """A jail of the usual size: a waiting one if there is one, else a new one. Raises SandboxError."""
        with self._changed:
            jail = self._waiting()
            self._taken += 1
            # the first request may be the only one
            if self._refill is None and self._taken > 1 and not self.closed:
                self._refill = threading.Thread(target=self._keep_filled, name="jails", daemon=True)
                self._refill.start()
            elif len(self._ready) <= self.size // 2:
                self._changed.notify()
        if jail is None:
            return self.make(self._room)
        # else the refilling thread is woken when this jail is closed: until then it would compete for the
        # processor
        jail.on_close = self._refill_soon
        return jail

    def _refill_soon(self) -> None:
        with self._changed:
            self._changed.notify()

    def make(self, room: dict[str, int], *, rehearse: bool = False) -> JailProcess:
        """A new jail with a workspace of this size.

        `rehearse`: the jail runs a request's steps in advance, which takes two milliseconds of processor time
        and makes its first answer a millisecond faster.
        """
        request, launcher = {**room, "rehearse": rehearse}, self._alive()
        try:
            return launcher.make(request)
        except SandboxError:
            if launcher.alive:
                raise
        return self._alive().make(request)

    def _waiting(self) -> JailProcess | None:
        """A waiting jail, or None; dead ones are dropped."""
        while self._ready:
            jail = self._ready.popleft()
            if jail.alive:
                return jail
            jail.close()
        return None

    def _alive(self) -> Launcher:
        """A live launcher; starts a new one if it died or has created enough jails."""
        with self._launcher_lock:
            if self.closed:
                raise SandboxError("the sandbox is closed")
            launcher = self._launcher
            if launcher is not None and launcher.alive and launcher.made < JAILS_A_LAUNCHER:
                return launcher
            if launcher is not None:
                launcher.retire()
                self._retired.append(launcher)
            for old in [old for old in self._retired if not old.alive]:
                old.close()
                self._retired.remove(old)
            self._launcher = Launcher(self._spec)
            return self._launcher

    def _keep_filled(self) -> None:
        # an ordinary user may raise its niceness but not lower it again
        calmer = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), calmer)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or len(self._ready) < self.size)
                # creating a jail takes a core: wait while the jail that was just taken works, unless few are
                # left
                while len(self._ready) > self.size // 2 and self._changed.wait(_CALM_S):
                    pass
                if self.closed:
                    return
                calm = len(self._ready) >= self.size // 2
            try:
                jail = self.make(self._room, rehearse=calm)
            except SandboxError:
                # the next caller of `take` gets the error; do not retry before that
                with self._changed:
                    self._refill = None
                return
            with self._changed:
                if not self.closed:
                    self._ready.append(jail)
                    continue
            jail.close()

    def close(self) -> None:
        """Kill the launchers with all their jails, also those in use. Idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        with self._launcher_lock:
            for launcher in (*self._retired, *([self._launcher] if self._launcher else [])):
                launcher.close()
        while self._ready:
            self._ready.popleft().close()


def shared_pool(spec: dict[str, Any], room: dict[str, int]) -> Pool:
    """The pool of this process for this spec and size."""
    key = json.dumps([spec, room], sort_keys=True)
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None or pool.closed:
            pool = _pools[key] = Pool(spec, room)
        return pool


@atexit.register
def close_pools() -> None:
    """Kill every launcher of this process. A later jail starts a new one."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


# a fork has none of the threads, and must not use its parent's connections
os.register_at_fork(after_in_child=_pools.clear)
