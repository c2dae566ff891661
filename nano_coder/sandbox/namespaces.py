"""The default backend: Linux namespaces, without daemon, privileges or dependencies.

A jail has its own namespaces and a workspace on its own tmpfs, and comes from a pool of warm jails. Between
runs only the workspace stays; processes and /tmp do not, unless the jail keeps them: then a server occupies
it. Nothing is written to a disk of the host, so closing a jail means killing its first process.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any, Unpack

from nano_coder.sandbox.jail_request import (
    FLOOD_BYTES,
    MOST_ENTRIES,
    WORK_MB,
    AnswerDrain,
    Drain,
    Output,
    PackedWorkspace,
    captured,
    check_limits,
    check_run,
    minimal_environment,
    opened,
    pack_workspace,
    python_program,
    snapshot_error,
)
from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.launcher.root import LAUNCHER_INSIDE
from nano_coder.sandbox.protocol import SANDBOXES, ExecResult, RunOptions, Sandbox, proven
from nano_coder.sandbox.proxy import PORT, VARIABLES, Proxy, ProxyCall, Resolve, resolve
from nano_coder.sandbox.root_plan import (
    FILE_MB,
    PROCESSES,
    always,
    find_interpreter,
    layers,
    own_uids,
    plan_cgroup,
    plan_root,
    unused_uid,
)
from nano_coder.sandbox.warm_pool import JailProcess, Pool, decoded, readable, shared_pool
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Denials, Limits

TMP_MB = 256
USUAL_MB = 64
"""size of a warm jail's workspace; a larger workspace gets a jail of its own"""
_USUAL_ENTRIES = 400

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
        )
        self._spec = spec

    @property
    def pool(self) -> Pool:
        """Jails that are ready; of another pool once `close_pools` has closed the last one."""
        if self._pool.closed:
            self._pool = shared_pool(self._spec, _room(USUAL_MB * _MB))
        return self._pool

    def with_mount(self, source: Path, target: str) -> NsSandbox:
        return self._with("binds", [(str(source), target)])

    def with_links(self, links: Sequence[tuple[str, str]]) -> NsSandbox:
        """This sandbox with links in its root, which is read-only: (target, path) each."""
        return self._with("links", links)

    def _with(self, kind: str, more: Sequence[tuple[str, str]]) -> NsSandbox:
        # a launcher of its own, so that no other jail has them in its root
        other, root = copy.copy(self), self._spec["root"]
        other._spec = {**self._spec, "root": {**root, kind: [*root[kind], *more]}}
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
        return self._open(workspace, limits)

    def open_new(self, workspace: Path | None, limits: Limits) -> NsJail:
        """As `open`, but always with a newly created jail."""
        return self._open(workspace, limits, new=True)

    def open_connected(
        self, workspace: Path | None, limits: Limits, allowed: frozenset[str], resolve: Resolve = resolve
    ) -> NsJail:
        """As `open`, with network access to the `allowed` hosts through a proxy in this process."""
        jail, listener = self.open_listening(workspace, limits)
        jail.proxy = Proxy(listener, allowed, resolve)
        return jail

    def open_listening(self, workspace: Path | None, limits: Limits) -> tuple[NsJail, socket.socket]:
        """As `open`, and a socket on which this process answers what connects to PORT in the jail."""
        jail = self._open(workspace, limits, new=True, listen=PORT)
        assert jail.listener is not None
        return jail, jail.listener

    def _open(self, workspace: Path | None, limits: Limits, *, new: bool = False, listen: int = 0) -> NsJail:
        check_limits(limits)
        packed = None if workspace is None else pack_workspace(Path(workspace))
        with contextlib.nullcontext() if packed is None else packed.stream:
            size, entries = (packed.size, packed.entries) if packed is not None else (0, 0)
            if (
                size > USUAL_MB * _MB or entries > _USUAL_ENTRIES
                or limits.processes not in (None, PROCESSES) or limits.workspace_mb not in (None, WORK_MB)
            ):  # fmt: skip
                process = self.pool.make(_room(size, entries, listen=listen, limits=limits))
            else:
                size = USUAL_MB * _MB
                process = self.pool.make(_room(size, listen=listen)) if new else self.pool.take()
            jail = self._jail(process, limits, size)
            if packed is not None:
                jail.begin(packed)
        return jail

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
        "work_bytes": (limits.workspace_mb or WORK_MB) * _MB + 2 * size,
        "work_inodes": MOST_ENTRIES + entries,
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
        self.proxy: Proxy | None = None
        self._first: bytes | None = None
        """a packed workspace to be unpacked by the next request"""
        self._keeps = False
        self._kept: JailServer | None = None

    def keep(self) -> bool:
        if not self._keeps:
            if self._first is not None:
                self.run_python("")  # the workspace arrives with it
            self._keeps = True
        return True

    @property
    def listener(self) -> socket.socket | None:
        """The socket that was opened for this process in the jail."""
        return self._process.listener

    @property
    def calls(self) -> list[ProxyCall]:
        """The attempts so far to reach a host through the proxy."""
        return self.proxy.calls if self.proxy else []

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
        way_out = VARIABLES if self.proxy else {}
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
        return self.proxy.refused if self.proxy else 0

    def _occupy(self, source: str, channel: int) -> RequestOutcome:
        """Run the trusted server of a jail that keeps its processes on a socket, until it ends."""
        request: dict[str, Any] = {"op": "python", "source": source, "argv": [], "isolated": False}
        if self.cold_python is not None:
            request = {"op": "run", "argv": python_program(self.cold_python, source, (), isolated=False)}
        memory = self._limits.memory_mb * _MB + self._room
        whole = {**request, "env": dict(self._environment), "memory_bytes": memory}
        said = Output(_SMALL), Output(_SMALL)
        options: dict[str, Any] = {"timeout": None, "flood": FLOOD_BYTES, "process": self._process}
        return self._call(whole, said, stdin=channel, **options)[0]

    def read(self, path: str) -> bytes:
        out = Output(_LONGEST_READ)
        drain = self._operate({"op": "read", "path": path}, out, flood=_LONGEST_READ)
        if drain.flooded:
            raise OSError(errno.EFBIG, f"longer than {FILE_MB} MB", path)
        return out.value()

    def write(self, path: str, data: bytes) -> None:
        self._operate({"op": "write", "path": path}, Output(_SMALL), stdin=data)

    def snapshot(self) -> bytes:
        """Files, directories and symlinks with their permissions, without caches of Python and pytest.

        The stream depends on nothing else, so equal workspaces have equal snapshots.
        """
        if (
            self._first is None
            and not self._keeps
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
        self._first = None
        try:
            self._operate({"op": "unpack"}, Output(_SMALL), packed=stream)
        except OSError as error:
            raise _does_not_fit(error) from error

    def begin(self, packed: PackedWorkspace) -> None:
        """Start with this workspace. Closes the jail if it does not fit."""
        if packed.small:
            self._first = packed.stream.read()  # with the next request
            return
        try:
            self.fill(packed.stream.fileno())
        except (UsageError, SandboxError):
            self.close()
            raise

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
    ) -> tuple[RequestOutcome, Drain]:
        with contextlib.ExitStack() as stack:
            given = [] if packed is None else [packed]
            if self._first is not None:
                given.append(stack.enter_context(opened(self._first)))
            whole = {"memory_bytes": self._limits.memory_mb * _MB, **request, "unpack": bool(given)}
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
        if self.proxy is not None:
            self.proxy.close()
        self._process.close()
        if self._kept is not None:
            self._kept.close()


def _does_not_fit(error: OSError) -> UsageError:
    return UsageError(f"the workspace does not fit its jail: {error}")


_SOURCE = (
    f"import sys; sys.path.insert(0, {LAUNCHER_INSIDE!r}); from launcher.runner import serve; "
    f"sys.path.remove({LAUNCHER_INSIDE!r}); serve()"
)
_PATIENCE_S = 10.0


class JailServer:
    """A server in a jail, which is busy with it until its end. Requests are served one at a time."""

    def __init__(self, occupy: Callable[[str, int], RequestOutcome]) -> None:
        """`occupy` runs Python source in the jail on a socket, and returns when it has ended."""
        self.end: RequestOutcome | None = None
        """how it ended, with all processes of the jail"""
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._ended: Future[RequestOutcome] = Future()
        threading.Thread(target=self._live, args=(occupy, theirs), name="kept jail", daemon=True).start()

    def _live(self, occupy: Callable[[str, int], RequestOutcome], theirs: socket.socket) -> None:
        try:
            with theirs:
                outcome = occupy(_SOURCE, theirs.fileno())
        except SandboxError as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(outcome)

    def call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        *,
        given: Sequence[int],
        timeout: float | None,
        flood: int,
    ) -> tuple[RequestOutcome, Drain]:
        """As `JailProcess.call`. Where the server ends meanwhile, the outcome is that end."""
        (out, out_inside), (err, err_inside) = os.pipe(), os.pipe()
        try:
            with self._lock:
                started = time.monotonic()
                drain = AnswerDrain({out: outputs[0], err: outputs[1]}, self._channel.fileno(), flood)
                if readable(self._channel) and not self._hung_up():
                    raise SandboxError("the jail's server spoke without being asked")
                self._channel.settimeout(timeout)
                with contextlib.suppress(OSError):  # its missing answer shows that
                    message.send(self._channel, request, [out_inside, err_inside, *given])
                self._channel.settimeout(None)
                left = None if timeout is None else max(0.001, timeout - (time.monotonic() - started))
                reply = self._answer() if drain.run(left, self.stop) else self._lost()
        finally:
            for fd in (out, out_inside, err, err_inside):
                os.close(fd)
        if self.end is not None:  # what it exits with is not the exit code of the request
            reply = self.end._replace(exit_code=None, signal=self.end.signal or 9)
        return reply, drain

    def _hung_up(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return self._channel.recv(1, socket.MSG_PEEK) == b""
        return True

    def stop(self) -> None:
        """End the request that is served. Any thread may ask."""
        with contextlib.suppress(OSError):
            message.send(self._channel, {"op": "end"})

    def _answer(self) -> RequestOutcome:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            # recv and not recvmsg: the kernel then drops descriptors that come with the data
            data = self._channel.recv(message.OUTCOME_SIZE + 1)
        return decoded(data) if data else self._lost()

    def _lost(self) -> RequestOutcome:
        """The end of the server. Raises SandboxError if the jail is gone, or does not end it."""
        self._channel.close()
        try:
            self.end = self._ended.result(_PATIENCE_S)
        except NotYet:
            raise SandboxError("a jail did not end its processes; open another") from None
        return self.end

    def close(self) -> None:
        """Hang up, which ends the server and every process of the jail."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


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
