"""Opens a sandbox backend by name and proves, once per process, that it isolates on this machine."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.protocol import Sandbox, in_image
from nano_coder.sandbox.root_plan import cannot_isolate
from nano_shared.errors import ConfigError, SandboxError, UsageError
from nano_shared.extensions import Extensions, call_extension, described, is_reference, refuse_missing, takes
from nano_shared.files import scratch_folder
from nano_shared.printable import printable
from nano_shared.types import Limits

SANDBOXES: Extensions[Callable[..., Sandbox]] = Extensions(
    "nano.sandboxes", check=lambda value: takes(value, "python")
)
"""what opens each kind, with the interpreter or None, and with the project if it takes one"""
_proved: set[tuple[str, str]] = set()
_lock = threading.Lock()


def open_sandbox(
    kind: str = "ns", *, python: str | None = None, image: str | None = None, project: Path | None = None
) -> Sandbox:
    """A sandbox that isolates, by its name in `nano.sandboxes` or by `path.py:function`.

    `python` is the path of the interpreter on the host, or in the image; None: the running one, or the
    image's. `project` is the directory whose copies will be workspaces: what the interpreter imports from it
    is imported from the workspace. `image` is the container image of a sandbox that runs images, for tasks
    that name none. Where "ns" does not work, "bwrap" is tried, and stderr says so. Raises UsageError for an
    unknown kind and for a missing interpreter, ConfigError for an extension that fails, SandboxError, with
    the failed layer and the command that fixes it, where this machine cannot isolate or lacks the image.
    It never falls back to less isolation.
    """
    if kind not in SANDBOXES and not is_reference(kind):
        refuse_missing(SANDBOXES.group, kind)
        raise UsageError(f"unknown sandbox {kind!r}; known: {', '.join(SANDBOXES)}, or path.py:function")
    opener = SANDBOXES.find(kind)
    host = not getattr(opener, "runs_images", False)  # else the path is one in the image
    if python is not None and host and shutil.which(python) is None:
        raise UsageError(f"no interpreter at {python!r}; name another with --python, or leave it out")
    arguments = (python, project) if takes(opener, "python", "project") is None else (python,)
    sandbox: Sandbox = call_extension(opener, *arguments, name=f"sandbox {kind}")
    if lacks := [name for name in ("name", "layers", "python", "open") if not hasattr(sandbox, name)]:
        raise ConfigError(f"sandbox {kind} is {described(sandbox)} without {', '.join(lacks)}")
    return sandbox if image is None else in_image(sandbox, image)


def open_ns(python: str | None, project: Path | None = None) -> Sandbox:
    """Namespaces; bubblewrap, if installed, where they do not isolate. Raises SandboxError."""
    try:
        return proven(NsSandbox(python, project))
    except SandboxError as refusal:
        if "bwrap" not in SANDBOXES:
            raise
        try:
            sandbox = SANDBOXES.find("bwrap")(python, project)
        except SandboxError:
            raise refusal from None
        print(f"sandbox: bwrap instead of ns, since {refusal}", file=sys.stderr)
        return sandbox


class Provable(Sandbox, Protocol):
    """A sandbox whose jails `prove` can try to leave."""

    @property
    def lacks(self) -> Sequence[str]:
        """A sentence for each layer that this machine does not offer."""


def proven(sandbox: Provable) -> Sandbox:
    """The sandbox, after `prove` once a process. Raises SandboxError as `prove`."""
    with _lock:
        if (sandbox.name, sandbox.python) not in _proved:
            prove(sandbox)
            _proved.add((sandbox.name, sandbox.python))
    for sentence in sandbox.lacks:
        print(printable(f"sandbox: {sentence}"), file=sys.stderr)
    return sandbox


def prove(sandbox: Provable) -> None:
    """Try to escape from a jail, and run its interpreter. Raises SandboxError with the layer that failed."""
    jail: Any
    with scratch_folder("canary") as outside, closing(sandbox.open(None, Limits())) as jail:
        canary = outside / "canary"
        canary.write_bytes(b"secret")
        for layer, held in jail.probe(canary).items():
            if not held:
                raise cannot_isolate(layer, None, "a trial escape succeeded")
        result = jail.run([sandbox.python, "-c", "print(1)"])
    if result.stdout != b"1\n":
        raise SandboxError(
            f"the interpreter {sandbox.python!r} does not run inside the sandbox ({result.last_words}); "
            "choose another with --python"
        )
