"""Warm jails: single-use, made ahead of need by a launcher that holds no secret.

Nothing of a task enters a jail before it is taken, and none comes back. One pool serves every caller of the
process that shows jails the same root.
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
"""after which a fresh launcher takes over, so that no flaw of one lives for ever"""
_NICE = 10
_CALM_S = 0.01

_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


class Pool:
    """Jails of one root, `size` of them ready from the second on that is asked for."""

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
        self._closed = False
        self._taken = 0

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self) -> list[JailProcess]:
        """Those that wait."""
        return list(self._ready)

    def take(self) -> JailProcess:
        """A jail of the usual room: one that waits, or a new one. Raises SandboxError."""
        with self._changed:
            jail = self._waiting()
            self._taken += 1
            # who asks once may never ask again
            if self._refill is None and self._taken > 1 and not self._closed:
                self._refill = threading.Thread(target=self._keep_filled, name="jails", daemon=True)
                self._refill.start()
            elif len(self._ready) <= self.size // 2:
                self._changed.notify()
        if jail is None:
            return self.make(self._room)
        # else the thread that refills is woken when this one is done: until then it would only be in the way
        jail.on_close = self._refill_soon
        return jail

    def _refill_soon(self) -> None:
        with self._changed:
            self._changed.notify()

    def make(self, room: dict[str, int], *, rehearse: bool = False) -> JailProcess:
        """A new jail with a workspace of another size.

        One that has rehearsed answers its first request a millisecond sooner, for two of processor time.
        """
        request, launcher = {**room, "rehearse": rehearse}, self._alive()
        try:
            return launcher.make(request)
        except SandboxError:
            if launcher.alive:
                raise
        return self._alive().make(request)

    def _waiting(self) -> JailProcess | None:
        """A ready jail; those that died while they waited are dropped."""
        while self._ready:
            jail = self._ready.popleft()
            if jail.alive:
                return jail
            jail.close()
        return None

    def _alive(self) -> Launcher:
        """The launcher, started anew where it has died or served its time."""
        with self._launcher_lock:
            if self._closed:
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
        # at most: an ordinary user may not take back what `nice` has given up
        calmer = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), calmer)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self.size)
                # building takes a core: not while the one that was just taken is at work, unless few are left
                while len(self._ready) > self.size // 2 and self._changed.wait(_CALM_S):
                    pass
                if self._closed:
                    return
                calm = len(self._ready) >= self.size // 2
            try:
                jail = self.make(self._room, rehearse=calm)
            except SandboxError:
                # who takes the next jail will see why; do not try again before that
                with self._changed:
                    self._refill = None
                return
            with self._changed:
                if not self._closed:
                    self._ready.append(jail)
                    continue
            jail.close()

    def close(self) -> None:
        """End the launcher with all its jails, those in use too. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._launcher_lock:
            for launcher in (*self._retired, *([self._launcher] if self._launcher else [])):
                launcher.close()
        while self._ready:
            self._ready.popleft().close()


def shared_pool(spec: dict[str, Any], room: dict[str, int]) -> Pool:
    """The pool of this process for jails of this kind."""
    key = json.dumps([spec, room], sort_keys=True)
    with _pools_lock:
        return _pools.setdefault(key, Pool(spec, room))


@atexit.register
def close_pools() -> None:
    """End every launcher of this process. A later jail starts another."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


# a fork has none of the threads, and must not speak on its parent's connections
os.register_at_fork(after_in_child=_pools.clear)
