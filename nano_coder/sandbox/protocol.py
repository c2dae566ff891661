"""The sandbox contract, and how a sandbox is opened by its name.

A sandbox opens jails on a workspace; a jail runs programs and moves files. The first of a kind is proven,
once per process, to isolate on this machine.
"""

from __future__ import annotations

import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

from nano_shared.errors import ConfigError, SandboxError, UsageError
from nano_shared.extension_points import (
    Extensions,
    call_extension,
    described,
    is_reference,
    refuse_missing,
    takes,
)
from nano_shared.files import scratch_folder
from nano_shared.printable import printable
from nano_shared.types import Denials, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """What one program used."""

    wall_s: float
    cpu_s: float = 0.0
    """seconds of processor time, of the program and its descendants"""
    peak_bytes: int = 0
    """largest resident set of one process"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """The result of one program. Output beyond the cap is cut in the middle: head and tail are kept."""

    exit_code: int | None
    """None if a signal ended it"""
    signal: int | None
    timed_out: bool
    oom: bool
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    """size before the cap"""
    stderr_bytes: int
    used: ResourceUse
    denials: Denials = Denials()  # noqa: RUF009 (frozen, so one is enough)

    @property
    def truncated(self) -> bool:
        return self.stdout_bytes > len(self.stdout) or self.stderr_bytes > len(self.stderr)

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def last_words(self) -> str:
        """The end of standard error, at most 300 characters; the whole result where that is empty."""
        return self.stderr.decode(errors="backslashreplace").strip()[-300:] or str(self)

    def as_json(self) -> dict[str, object]:
        """The fields that are shown to users, with the output as text."""
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "timed_out": self.timed_out,
            "oom": self.oom,
            "stdout": self.stdout.decode("utf-8", "backslashreplace"),
            "stderr": self.stderr.decode("utf-8", "backslashreplace"),
            "truncated": self.truncated,
            "wall_s": round(self.used.wall_s, 6),
        }


class RunOptions(TypedDict, total=False):
    """Options of one run."""

    stdin: bytes | int
    """standard input; a number is an open descriptor, which the caller keeps: a socket, say"""
    timeout: float
    """seconds of wall time; the jail's limit if left out"""
    env: Mapping[str, str]
    """added to the minimal environment"""
    output_bytes: int
    """bytes kept of each stream; the jail's limit if left out"""


class Jail(Protocol):
    """A private workspace mounted at /work. Files stay between runs, processes do not."""

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        """Run a program in /work.

        Raises UsageError for arguments that no program can be given, SandboxError when the jail itself fails.
        A failure of the program is a result, not an error.
        """
        ...

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        """Run Python source as `python -c source *argv` does, in a warm interpreter if there is one.

        `isolated` keeps the workspace off sys.path, as `python -I` does. Raises as `run` does.
        """
        ...

    def read(self, path: str) -> bytes:
        """Contents of a regular file of the workspace, read inside the jail.

        Raises FileNotFoundError, IsADirectoryError, PermissionError as a program in the jail would get them.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file of the workspace inside the jail, with its parent directories."""
        ...

    def snapshot(self) -> bytes:
        """The workspace as an uncompressed tar stream, written inside the jail.

        Raises SnapshotError if a program made the workspace too large, too deep or unreadable.
        """
        ...

    def restore(self, snapshot: bytes) -> None:
        """Replace the workspace by the contents of a snapshot, inside the jail."""
        ...

    def close(self) -> None:
        """Kill all processes and remove the private workspace. Idempotent."""
        ...


@runtime_checkable
class SupportsKeeping(Protocol):
    """A jail that can keep processes and /tmp between its runs."""

    def keep(self) -> bool:
        """From now on keep them until the jail is closed; whether it does.

        A time-out ends the session of its run alone. A run that needs too much memory ends all processes.
        """
        ...


class InterruptibleJail(Jail, Protocol):
    """A jail whose current program another thread may end."""

    def interrupt(self) -> None:
        """Kill the program that runs now, and its descendants; its run returns. Nothing if none runs."""
        ...


class Sandbox(Protocol):
    """A kind of sandbox. `layers` tells which layers of isolation are on; it is logged with runs."""

    name: str
    layers: Mapping[str, bool]
    python: str
    """the interpreter's path inside the jail, for argv[0]"""

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        """A jail on a private copy of `workspace` (None: empty). The original is never written to.

        Raises SandboxError with the reason and the remedy if this machine cannot isolate.
        """
        ...


@runtime_checkable
class SupportsMounts(Protocol):
    """A sandbox that can mount another folder of the host into its jails, read-only."""

    def with_mount(self, source: Path, target: str) -> Sandbox:
        """This sandbox with `source` mounted at `target`; jails of the original do not see it."""
        ...


_HIDDEN = ("/tmp", "/work", "/dev/shm", "/proc")
"""folders of the host that a jail does not show, since it has its own"""


def place_in_jail(folder: Path) -> str:
    """Where a jail shows a folder of the host: at the same place, or below /opt/agents if that is its own."""
    hidden = any(folder.is_relative_to(own) for own in _HIDDEN)
    return f"/opt/agents/{folder.name}" if hidden else str(folder)


def showing(sandbox: Sandbox, folders: Sequence[Path]) -> Sandbox:
    """The sandbox with these folders in its jails, read-only. Raises UsageError for one that shows none."""
    for folder in folders:
        if not isinstance(sandbox, SupportsMounts):
            raise UsageError(f"the sandbox {sandbox.name!r} cannot show folders of this machine; use ns")
        sandbox = sandbox.with_mount(folder, place_in_jail(folder))
    return sandbox


@runtime_checkable
class SupportsHosts(Protocol):
    """A sandbox that can let its jails reach named hosts."""

    def with_hosts(self, hosts: frozenset[str]) -> Sandbox:
        """This sandbox with a way out to these hosts; jails of the original have none."""
        ...


HOST = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LONGEST_HOST = 253


def allowed_hosts(network: str) -> frozenset[str]:
    """The hosts of `none` or `allow=HOST,...`; `*.example.org` allows every host below. Raises UsageError."""
    if network == "none":
        return frozenset()
    hosts = frozenset(host.strip().lower() for host in network.removeprefix("allow=").split(","))
    for host in hosts:
        if not network.startswith("allow=") or len(host) > LONGEST_HOST or not HOST.fullmatch(host):
            raise UsageError(
                f"--net {network[:100]!r}: say none, or allow=HOST,... with names such as api.example.org"
            )
    return hosts


def covers(allowed: frozenset[str], host: str) -> bool:
    """Whether a host, or all hosts below one, are among the allowed."""
    return host in allowed or any(a.startswith("*.") and host.endswith(a[1:]) for a in allowed)


def connected(sandbox: Sandbox, hosts: frozenset[str]) -> Sandbox:
    """The sandbox with a way out to these hosts. Raises UsageError for one that has none."""
    if not hosts:
        return sandbox
    if not isinstance(sandbox, SupportsHosts):
        raise UsageError(f"the sandbox {sandbox.name!r} has no way out to named hosts; use --sandbox ns")
    return sandbox.with_hosts(hosts)


@runtime_checkable
class SupportsImages(Protocol):
    """A sandbox whose programs run in container images."""

    def with_image(self, name: str | None) -> Sandbox:
        """This sandbox with the image; None: with the one it has. Raises UsageError where there is none,
        SandboxError for an image that this machine lacks."""
        ...


def in_image(sandbox: Sandbox, image: str | None) -> Sandbox:
    """The sandbox with a task's image. Raises UsageError for one that runs no images."""
    if isinstance(sandbox, SupportsImages):
        return sandbox.with_image(image)
    if image is not None:
        raise UsageError(
            f"the sandbox {sandbox.name!r} runs no image, and {image!r} is named; use --sandbox podman, or"
            " NANO_SANDBOX=podman where there is no such option"
        )
    return sandbox


@runtime_checkable
class SupportsListening(Protocol):
    """A sandbox that can open a socket in a jail for this process to answer on."""

    def open_listening(
        self, workspace: Path | None, limits: Limits
    ) -> tuple[InterruptibleJail, socket.socket]:
        """As `Sandbox.open`, and a socket that listens on 127.0.0.1:3128 in the jail."""
        ...


class LazyJail:
    """A Jail that `opener` opens on first use. Raises then what `opener` raises."""

    def __init__(self, opener: Callable[[], Jail]) -> None:
        self._opener = opener
        self._jail: Jail | None = None
        self._closed = False

    @property
    def opened(self) -> bool:
        return self._jail is not None

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        return self._open().run(argv, **options)

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        return self._open().run_python(source, argv, isolated=isolated, **options)

    def read(self, path: str) -> bytes:
        return self._open().read(path)

    def write(self, path: str, data: bytes) -> None:
        self._open().write(path, data)

    def snapshot(self) -> bytes:
        return self._open().snapshot()

    def restore(self, snapshot: bytes) -> None:
        self._open().restore(snapshot)

    def keep(self) -> bool:
        jail = self._open()
        return isinstance(jail, SupportsKeeping) and jail.keep()

    def close(self) -> None:
        """As of any jail; one that is being opened is closed then, and none is opened after."""
        self._closed = True
        if self._jail is not None:
            self._jail.close()

    def _open(self) -> Jail:
        if self._jail is None and not self._closed:
            self._jail = self._opener()
        if self._closed or self._jail is None:
            self.close()
            raise SandboxError("the jail is closed: open another")
        return self._jail


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
    from nano_coder.sandbox.root_plan import cannot_isolate

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
