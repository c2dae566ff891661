"""Chooses a backend by name and proves, once per process, that it holds on this machine."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from nano_coder.sandbox.none import NoSandbox
from nano_coder.sandbox.ns import NsSandbox
from nano_coder.sandbox.protocol import Sandbox
from nano_coder.sandbox.remedy import cannot_isolate
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits

_proved: set[str] = set()
_lock = threading.Lock()


def open_sandbox(kind: str = "ns", *, python: str | None = None) -> Sandbox:
    """A backend that holds. `python` is the interpreter's path on the host; None is the one that runs this.

    Raises UsageError for an unknown kind and for an interpreter that is not there; SandboxError, naming the
    layer that failed and the command that mends it, where this machine cannot isolate. It never falls back
    to less.
    """
    backends: dict[str, Callable[[str | None], Sandbox]] = {"ns": _proven, "none": NoSandbox}
    if kind not in backends:
        raise UsageError(f"unknown sandbox {kind!r}; known: {', '.join(backends)}")
    if python is not None and shutil.which(python) is None:
        raise UsageError(f"no interpreter at {python!r}; name another with --python, or leave it out")
    return backends[kind](python)


def _proven(python: str | None) -> NsSandbox:
    sandbox = NsSandbox(python)
    with _lock:
        if sandbox.python not in _proved:
            prove(sandbox)
            _proved.add(sandbox.python)
    return sandbox


def prove(sandbox: NsSandbox) -> None:
    """Try to escape from a jail, and run its interpreter. Raises SandboxError naming what did not hold."""
    with (
        tempfile.NamedTemporaryFile(prefix="nano-canary-") as canary,
        closing(sandbox.open(None, Limits())) as jail,
    ):
        canary.write(b"secret")
        canary.flush()
        for layer, held in jail.probe(Path(canary.name)).items():
            if not held:
                raise cannot_isolate(layer, None, "a trial escape succeeded")
        result = jail.run([sandbox.python, "-c", "print(1)"])
    if result.stdout != b"1\n":
        said = result.stderr.decode(errors="backslashreplace").strip()[-300:]
        raise SandboxError(
            f"the interpreter {sandbox.python!r} does not run inside the sandbox ({said or result}); "
            "choose another with --python"
        )
