"""Chooses a backend by name and proves, once per process, that it holds on this machine."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import closing

from nano_coder.sandbox.bubblewrap import BwrapSandbox
from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.protocol import Sandbox
from nano_coder.sandbox.unavailable import cannot_isolate
from nano_coder.sandbox.unisolated import NoSandbox
from nano_shared.errors import SandboxError, UsageError
from nano_shared.scratch import scratch_folder
from nano_shared.types import Limits

_proved: set[tuple[str, str]] = set()
_lock = threading.Lock()


def open_sandbox(kind: str = "ns", *, python: str | None = None) -> Sandbox:
    """A backend that holds. `python` is the interpreter's path on the host; None is the one that runs this.

    Where "ns" cannot isolate, it is "bwrap" that does, and stderr says so. Raises UsageError for an unknown
    kind and for an interpreter that is not there; SandboxError, naming the layer that failed and the command
    that mends it, where this machine cannot isolate. It never falls back to less.
    """
    backends: dict[str, Callable[[str | None], Sandbox]] = {"ns": _best, "bwrap": _bwrap, "none": NoSandbox}
    if kind not in backends:
        raise UsageError(f"unknown sandbox {kind!r}; known: {', '.join(backends)}")
    if python is not None and shutil.which(python) is None:
        raise UsageError(f"no interpreter at {python!r}; name another with --python, or leave it out")
    return backends[kind](python)


def _best(python: str | None) -> Sandbox:
    try:
        return _proven(NsSandbox(python))
    except SandboxError as refusal:
        try:
            sandbox = _bwrap(python)
        except SandboxError:
            raise refusal from None
        print(f"sandbox: bwrap instead of ns, since {refusal}", file=sys.stderr)
        return sandbox


def _bwrap(python: str | None) -> Sandbox:
    return _proven(BwrapSandbox(python))


def _proven(sandbox: NsSandbox | BwrapSandbox) -> Sandbox:
    with _lock:
        if (sandbox.name, sandbox.python) not in _proved:
            prove(sandbox)
            _proved.add((sandbox.name, sandbox.python))
    return sandbox


def prove(sandbox: NsSandbox | BwrapSandbox) -> None:
    """Try to escape from a jail, and run its interpreter. Raises SandboxError naming what did not hold."""
    with (
        scratch_folder("canary") as outside,
        closing(sandbox.open(None, Limits())) as jail,
    ):
        canary = outside / "canary"
        canary.write_bytes(b"secret")
        for layer, held in jail.probe(canary).items():
            if not held:
                raise cannot_isolate(layer, None, "a trial escape succeeded")
        result = jail.run([sandbox.python, "-c", "print(1)"])
    if result.stdout != b"1\n":
        said = result.stderr.decode(errors="backslashreplace").strip()[-300:]
        raise SandboxError(
            f"the interpreter {sandbox.python!r} does not run inside the sandbox ({said or result}); "
            "choose another with --python"
        )
