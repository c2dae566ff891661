"""The default backend: Linux namespaces, without daemon, privileges or dependencies.

A jail has its own namespaces and a workspace on its own tmpfs, and comes from a pool of warm jails. Between
runs only the workspace stays; processes and /tmp do not. Nothing is written to a disk of the host, so closing
a jail means killing its first process.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import socket
from typing import Any, Unpack

from nano_coder.sandbox.captured_output import FLOOD_BYTES, Drain, Output, captured
from nano_coder.sandbox.interpreter import find_interpreter
from nano_coder.sandbox.jail_server import JailServer
from nano_coder.sandbox.launcher import files, message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.launcher.root import BASES
from nano_coder.sandbox.launcher_process import JailProcess
from nano_coder.sandbox.protocol import ExecResult, RunOptions
from nano_coder.sandbox.proxy import PORT, VARIABLES, Proxy, ProxyCall, Resolve, resolve
from nano_coder.sandbox.request import check_limits, check_run, minimal_environment, opened, python_program
from nano_coder.sandbox.root_plan import (
    FILE_MB,
    PROCESSES,
    always,
    layers,
    own_uids,
    plan_cgroup,
    plan_root,
    unused_uid,
)
from nano_coder.sandbox.warm_pool import Pool, shared_pool
from nano_coder.sandbox.workspace_archive import (
    OVERLAID_ENTRIES,
    WORK_MB,
    PackedWorkspace,
    PendingFiles,
    base_of,
    bases_folder,
    overlays_supported,
    pack_workspace,
    snapshot_error,
)
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Denials, Limits

TMP_MB = 256
WORK_INODES = 20_000
"""files, directories and links that may be added to a workspace; each takes kernel memory"""
USUAL_MB = 64
"""size of a warm jail's workspace; a larger workspace gets a jail of its own"""

_NONE_DENIED = Denials()
_MB = 1 << 20
_SMALL = 4096
_LONGEST_READ = FILE_MB * _MB
_OPERATION_S = 120.0


def _place(python: str) -> tuple[str, str]:
    """Real path of the program, and of the environment's folder.

    Only our own interpreter in our own environment may run as the launcher, outside a jail: another
    environment could bring a sitecustomize.
    """
    return os.path.realpath(python), os.path.realpath(os.path.dirname(os.path.abspath(python)))


class NsSandbox:
    name = "ns"

    def __init__(self, python: str | None = None, project: Path | None = None) -> None:
        """`python` is the path of the interpreter on the host; None: the running one. `project`: as
        `find_interpreter` has it.

        Raises SandboxError if the interpreter cannot be mounted.
        """
        self._interpreter = find_interpreter(python or sys.executable, project)
        self.python, self.lacks = self._interpreter.path, self._interpreter.lacks
        # the launcher imports nothing of a workspace
        warm = not self._interpreter.shows_project and _place(python or sys.executable) == _place(
            sys.executable
        )
        environment = minimal_environment(self._interpreter.search_path)
        spec: dict[str, Any] = {
            "root": plan_root(self._interpreter),
            "unused_uid": unused_uid(),
            "own_uids": own_uids(),
            "group": plan_cgroup(),
            "warm_python": self.python if warm else None,
            "environment": environment,
        }
        self._pool = shared_pool(spec, _room(USUAL_MB * _MB))
        self._environment = environment
        self._warm = warm
        self._hosts: frozenset[str] = frozenset()
        self.layers: Mapping[str, bool] = layers(
            cgroup=spec["group"] is not None,
            host_uid_of_its_own=spec["own_uids"],
            overlay_workspaces=overlays_supported(),
        )
        self._spec = spec

    @property
    def pool(self) -> Pool:
        """Jails that are ready; of another pool once `close_pools` has closed the last one."""
        if self._pool.closed:
            self._pool = shared_pool(self._spec, _room(USUAL_MB * _MB))
        return self._pool

    def with_mount(self, source: Path, target: str) -> NsSandbox:
        # a launcher of its own, so that no other jail has the folder in its mounts
        other, root = copy.copy(self), self._spec["root"]
        other._spec = {**self._spec, "root": {**root, "binds": [*root["binds"], (str(source), target)]}}
        other._pool = shared_pool(other._spec, _room(USUAL_MB * _MB))
        return other

    def with_links(self, links: Sequence[tuple[str, str]]) -> NsSandbox:
        """This sandbox with links in its root, which is read-only: (target, path) each."""
        other, root = copy.copy(self), self._spec["root"]
        other._spec = {**self._spec, "root": {**root, "links": [*root["links"], *links]}}
        other._pool = shared_pool(other._spec, _room(USUAL_MB * _MB))
        return other

    def with_hosts(self, hosts: frozenset[str]) -> NsSandbox:
        other = copy.copy(self)
        other._hosts = hosts
        return other

    def open(self, workspace: Path | None, limits: Limits) -> NsJail:
        """Raises UsageError for a workspace that cannot be read, SandboxError if isolation fails."""
        if self._hosts:
            return self.open_connected(workspace, limits, self._hosts)
        return self._open(workspace, limits, self.pool.take)

    def open_new(self, workspace: Path | None, limits: Limits) -> NsJail:
        """As `open`, but always with a newly created jail."""
        return self._open(workspace, limits, lambda: self.pool.make(_room(USUAL_MB * _MB)))

    def open_connected(
        self, workspace: Path | None, limits: Limits, allowed: frozenset[str], resolve: Resolve = resolve
    ) -> NsJail:
        """As `open`, with network access to the `allowed` hosts through a proxy in this process."""

        def usual() -> JailProcess:
            return self.pool.make(_room(USUAL_MB * _MB, listen=PORT))

        jail = self._open(workspace, limits, usual, listen=PORT)
        jail.connect(allowed, resolve)
        return jail

    def open_listening(self, workspace: Path | None, limits: Limits) -> tuple[NsJail, socket]:
        """As `open`, and a socket on which this process answers what connects to PORT in the jail."""

        def usual() -> JailProcess:
            return self.pool.make(_room(USUAL_MB * _MB, listen=PORT))

        jail = self._open(workspace, limits, usual, listen=PORT)
        assert jail.listener is not None
        return jail, jail.listener

    def _open(
        self, workspace: Path | None, limits: Limits, usual: Callable[[], JailProcess], *, listen: int = 0
    ) -> NsJail:
        check_limits(limits)
        fits = limits.processes in (None, PROCESSES) and limits.workspace_mb in (None, WORK_MB)
        if workspace is None:
            process = usual() if fits else self.pool.make(_room(0, listen=listen, limits=limits))
            jail = self._jail(process, limits, USUAL_MB * _MB if fits else 0)
            jail.begin_empty()
            return jail
        packed = pack_workspace(Path(workspace))
        with packed.stream:
            if (overlaid := self._overlaid(packed, limits, listen)) is not None:
                return overlaid
            if packed.small and fits:
                jail = self._jail(usual(), limits, USUAL_MB * _MB)
                jail.fill_first(packed.stream.read())
                return jail
            if packed.size > USUAL_MB * _MB or packed.entries > OVERLAID_ENTRIES or not fits:
                room = _room(packed.size, packed.entries, listen=listen, limits=limits)
                jail = self._jail(self.pool.make(room), limits, packed.size)
            else:
                jail = self._jail(usual(), limits, USUAL_MB * _MB)
            try:
                jail.fill(packed.stream.fileno())
            except (UsageError, SandboxError):
                jail.close()
                raise
        return jail

    def _overlaid(self, packed: PackedWorkspace, limits: Limits, listen: int) -> NsJail | None:
        """A jail that mounts a large workspace as an overlay; None for a small one, or if overlays fail."""
        if packed.entries < OVERLAID_ENTRIES or not self.layers["overlay_workspaces"]:
            return None
        owner = self._spec["unused_uid"] if os.geteuid() == 0 else None
        root = self._spec["root"]
        shown = (str(bases_folder()), BASES)
        # a launcher of its own, so that no other jail has the bases in its mounts; all its jails run as one
        # user, who owns the files of the bases
        spec = {**self._spec, "own_uids": False, "root": {**root, "binds": [*root["binds"], shown]}}
        try:
            room = {
                **_room(packed.size, packed.entries, listen=listen, limits=limits),
                "base": base_of(packed.stream, owner),
            }
            process = shared_pool(spec, _room(USUAL_MB * _MB)).make(room)
        except (OSError, SandboxError):
            # streaming the workspace instead loses no isolation; `layers` and `doctor` report it
            self.layers = {**self.layers, "overlay_workspaces": False}
            packed.stream.seek(0)
            return None
        return self._jail(process, limits, packed.size)

    def _jail(self, process: JailProcess, limits: Limits, size: int) -> NsJail:
        if not process.grouped:
            # the memory watch still works without a control group; `layers` and `doctor` report it
            self.layers = {**self.layers, "cgroup": False}
        room = _room(size, limits=limits)["work_bytes"]
        return NsJail(process, limits, self._environment, room, None if self._warm else self.python)


def _room(size: int, entries: int = 0, *, listen: int = 0, limits: Limits | None = None) -> dict[str, Any]:
    """Limits for a workspace that starts with `size` bytes and `entries` entries, and the port to listen
    on."""
    limits = limits or Limits()
    return {
        "listen": listen,
        "base": "",
        "work_bytes": (limits.workspace_mb or WORK_MB) * _MB + 2 * size,
        "work_inodes": WORK_INODES + entries,
        "tmp_mb": TMP_MB,
        "rlimits": always(limits),
    }


class NsJail:
    def __init__(
        self,
        process: JailProcess,
        limits: Limits,
        environment: Mapping[str, str],
        room: int,
        cold_python: str | None,
    ) -> None:
        """`cold_python`: the interpreter to start for Python source, if no warm one may run it."""
        self._process = process
        self._limits = limits
        self._environment = environment
        self._room = room
        self.cold_python = cold_python
        self._proxy: Proxy | None = None
        self._first: bytes | None = None
        """a packed workspace to be unpacked by the next request"""
        self._ahead: PendingFiles | None = None
        self._keeps = False
        self._kept: JailServer | None = None

    def keep(self) -> bool:
        if not self._keeps:
            if self._first is not None or self._ahead:
                self.run_python("")  # the workspace arrives with it
            self._keeps = True
        return True

    def connect(self, allowed: frozenset[str], resolve: Resolve) -> None:
        """Start the proxy on the jail's listening socket."""
        assert self._process.listener is not None
        self._proxy = Proxy(self._process.listener, allowed, resolve)

    @property
    def listener(self) -> socket | None:
        """The socket that was opened for this process in the jail."""
        return self._process.listener

    @property
    def calls(self) -> list[ProxyCall]:
        """The attempts so far to reach a host through the proxy."""
        return self._proxy.calls if self._proxy else []

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        return self._run({"op": "run", "argv": list(argv)}, argv, options)

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        request: dict[str, Any] = {"op": "python", "source": source, "argv": list(argv), "isolated": isolated}
        program = python_program(self.cold_python or "python", source, argv, isolated=isolated)
        if self.cold_python is not None:
            request = {"op": "run", "argv": program}
        return self._run(request, program, options)

    def _run(self, request: dict[str, Any], argv: Sequence[str], options: RunOptions) -> ExecResult:
        wall = options.get("timeout", self._limits.tool_seconds)
        cap = options.get("output_bytes", self._limits.output_bytes)
        env = options.get("env", {})
        check_run(argv, env, wall, cap)
        way_out = VARIABLES if self._proxy else {}
        whole = {**self._environment, **way_out, **env}
        request = {**request, "env": whole}
        refused = self._refused()
        out, err = Output(cap), Output(cap)
        started = time.monotonic()
        stdin = options.get("stdin", b"")
        reply, drain = self._call(request, (out, err), stdin=stdin, timeout=wall, flood=FLOOD_BYTES)
        return captured(
            out, err, started, exit_code=reply.exit_code, signal=reply.signal,
            # a program that ended by itself before the kill reached it did not time out
            timed_out=drain.timed_out and reply.exit_code is None,
            oom=reply.oom, cpu_s=reply.cpu_s, peak_bytes=reply.peak_bytes,
            denials=Denials(network=now - refused) if (now := self._refused()) > refused else _NONE_DENIED,
        )  # fmt: skip

    def interrupt(self) -> None:
        self._process.interrupt()

    def _refused(self) -> int:
        """Number of calls so far to hosts that are not allowed."""
        return self._proxy.refused if self._proxy else 0

    def _occupy(self, source: str, channel: int) -> RequestOutcome:
        """Run the trusted server of a jail that keeps its processes on a socket, until it ends."""
        request: dict[str, Any] = {"op": "python", "source": source, "argv": [], "isolated": False}
        if self.cold_python is not None:
            request = {"op": "run", "argv": python_program(self.cold_python, source, (), isolated=False)}
        whole = {**request, "env": dict(self._environment)}
        said = Output(_SMALL), Output(_SMALL)
        options: dict[str, Any] = {"timeout": None, "flood": FLOOD_BYTES, "process": self._process}
        return self._call(whole, said, stdin=channel, more=self._room, **options)[0]

    def read(self, path: str) -> bytes:
        out = Output(_LONGEST_READ)
        drain = self._operate({"op": "read", "path": path}, out, flood=_LONGEST_READ)
        if drain.flooded:
            raise OSError(errno.EFBIG, f"longer than {FILE_MB} MB", path)
        return out.value()

    def write(self, path: str, data: bytes) -> None:
        if self._ahead is None or files.placed(path)[0] or not self._ahead.keep(path, data):
            self._operate({"op": "write", "path": path}, Output(_SMALL), stdin=data)

    def snapshot(self) -> bytes:
        """Files, directories and symlinks with their permissions, without caches of Python and pytest.

        The stream depends on nothing else, so equal workspaces have equal snapshots.
        """
        if (
            self._first is None
            and not self._keeps
            and not self._ahead
            and (packed := self._process.pack(_OPERATION_S)) is not None
        ):
            return packed
        longest = self._room + _MB * 64
        out = Output(longest)
        try:
            drain = self._operate({"op": "pack", "size": self._room}, out, flood=longest)
        except OSError as error:
            raise snapshot_error(error) from error
        if drain.flooded:
            raise snapshot_error(OSError(errno.EFBIG, f"it is longer than {longest >> 20} MB when packed"))
        return out.value()

    def restore(self, snapshot: bytes) -> None:
        """Replace the workspace by the contents of a snapshot, inside the jail."""
        with opened(snapshot) as stream:
            self.fill(stream)

    def fill(self, stream: int) -> None:
        """Replace the workspace by the contents of a tar stream, read from an open file."""
        self._first = self._ahead = None
        try:
            self._operate({"op": "unpack"}, Output(_SMALL), packed=stream)
        except OSError as error:
            raise _does_not_fit(error) from error

    def begin_empty(self) -> None:
        """Start with an empty workspace; files written now are sent with the first request."""
        self._ahead = PendingFiles()

    def fill_first(self, packed: bytes) -> None:
        """Let the next request start with this workspace, instead of what is there."""
        self._first = packed

    def _operate(
        self,
        request: dict[str, Any],
        out: Output,
        *,
        stdin: bytes = b"",
        packed: int | None = None,
        flood: int = _SMALL,
    ) -> Drain:
        """Run a file operation by trusted code in the jail. Raises OSError as the operation does."""
        outputs = (out, Output(_SMALL))
        reply, drain = self._call(
            request, outputs, stdin=stdin, packed=packed, timeout=_OPERATION_S, flood=flood
        )
        if reply.refused is not None:
            raise OSError(*reply.refused, request.get("path"))
        if reply.oom:
            raise OSError(errno.ENOMEM, "the jail's memory is full", request.get("path"))
        if drain.timed_out or (reply.exit_code != 0 and not drain.flooded):
            raise SandboxError(f"the file operation {request['op']!r} failed inside the jail: {reply}")
        return drain

    def _call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        *,
        stdin: bytes | int,
        packed: int | None = None,
        timeout: float | None,
        flood: int,
        process: JailProcess | None = None,
        more: int = 0,
    ) -> tuple[RequestOutcome, Drain]:
        if self._ahead:
            self._first = self._ahead.packed()
        self._ahead = None
        with contextlib.ExitStack() as stack:
            given = [] if packed is None else [packed]
            if self._first is not None:
                given.append(stack.enter_context(opened(self._first)))
            whole = {**request, "unpack": bool(given), "memory_bytes": self._limits.memory_mb * _MB + more}
            if stdin != b"":
                given.append(stack.enter_context(opened(stdin)))
            server = process or self._server()
            reply, drain = server.call(whole, outputs, given=given, timeout=timeout, flood=flood)
        if self._first is not None:
            if reply.refused is not None and reply.exit_code == message.UNFIT:
                raise _does_not_fit(OSError(*reply.refused))
            self._first = None
        return reply, drain

    def _server(self) -> JailProcess | JailServer:
        """What serves the next request."""
        if not self._keeps:
            return self._process
        if self._kept is None or self._kept.end is not None:
            # files that stay are not the memory of the program that wrote them
            self._kept = JailServer(self._occupy)
        return self._kept

    def probe(self, secret: Path) -> dict[str, bool]:
        """Try to escape from inside. Returns layer -> whether it held. `secret` is a file that must not be
        readable."""
        out = Output(_SMALL)
        self._operate({"op": "probe", "secret": str(secret)}, out)
        held: dict[str, bool] = json.loads(out.value())
        return held

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
        self._process.close()
        if self._kept is not None:
            self._kept.close()


def _does_not_fit(error: OSError) -> UsageError:
    return UsageError(f"the workspace does not fit its jail: {error}")
