"""The bubblewrap backend, for machines on which bubblewrap may create namespaces and we may not.

Each run is a new bubblewrap process over a workspace in a private directory of the host: there is no pool of
warm jails, and the workspace's size is limited by the host's disk. All other layers are those of the default
backend.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nano_coder.sandbox.jail_request import Drain, check_limits, minimal_environment, seal
from nano_coder.sandbox.launcher import files, kernel, root
from nano_coder.sandbox.root_plan import find_interpreter, layers, plan_root, rlimits, unused_uid
from nano_containers.container import HeldProgram
from nano_containers.folder_jail import FolderJail, ProgramResult, ProgramSpec
from nano_shared.errors import SandboxError
from nano_shared.process import own_python
from nano_shared.types import Limits

SEARCHED = "/usr/bin:/usr/local/bin:/bin"
"""not the caller's PATH, which may lead into an untrusted repository"""
_OLDEST = (0, 7)
"""first version that can limit the size of a tmpfs"""
_TMP_MB, _SHM_MB = 256, 64
_NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup")


def find_bubblewrap() -> str:
    """Path of bubblewrap. Raises SandboxError with the remedy if it is missing or too old."""
    program = shutil.which("bwrap", path=SEARCHED)
    if program is None:
        raise SandboxError(
            "the sandbox 'bwrap' needs bubblewrap; install it: sudo apt-get install bubblewrap"
        )
    said = subprocess.run([program, "--version"], env={}, capture_output=True, text=True, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        raise SandboxError(
            f"{program} is {said.strip() or 'of no known version'}; the sandbox 'bwrap' needs 0.7 or newer: "
            "sudo apt-get install bubblewrap"
        )
    return program


def bubblewrap_options(
    plan: dict[str, Any], folders: Sequence[str], hand_over: Callable[[bytes], int]
) -> list[str]:
    """Command-line options for all layers, over the workspace and the state (`folders`). `hand_over` makes a
    file descriptor that bubblewrap inherits, of bytes."""
    given = [f"--unshare-{name}" for name in _NAMESPACES]
    given += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    given += ["--die-with-parent", "--new-session", "--clearenv"]
    for target, path in plan["links"]:
        given += ["--symlink", target, path]
    for path, text, mode in plan["files"]:
        given += [
            "--perms", f"{mode:04o}", "--file", str(hand_over(text.encode(errors="surrogateescape"))), path,
        ]  # fmt: skip
    for source, target in plan["binds"]:
        given += ["--ro-bind", source, target]
    for text, target in plan["covers"]:
        given += ["--ro-bind-data", str(hand_over(text.encode(errors="surrogateescape"))), target]
    given += ["--dev", "/dev", "--proc", "/proc"]
    for path, megabytes in (("/tmp", _TMP_MB), ("/dev/shm", _SHM_MB)):
        given += ["--perms", "1777", "--size", str(megabytes * _MB), "--tmpfs", path]
    # last: until here mount points are still created
    for folder, target in zip(folders, ("/work", files.STATE), strict=True):
        given += ["--bind", folder, target]
    return [*given, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"]


def encode_arguments(arguments: list[str]) -> bytes:
    """NUL-terminated arguments, as bubblewrap's --args reads them."""
    return b"".join(os.fsencode(argument) + b"\0" for argument in arguments)


_START = (
    "import sys; sys.path.insert(0, {path!r}); from launcher import single_program; single_program.main{fds}"
)
_STAGE = "import sys; sys.path.insert(0, {path!r}); from launcher import root; root.become_user{call}"
_LONGEST_INFO = 1 << 16


@dataclass(frozen=True, slots=True)
class BubblewrapSettings:
    """Settings that all runs of one sandbox share."""

    program: str
    """path of bubblewrap"""
    plan: dict[str, Any]
    """root plan, see `root_plan.plan_root`"""
    python: str
    """path of the interpreter inside the jail"""
    owner: int | None
    """uid and gid that programs run as on the host, if we are root; else None"""
    staged: bool
    """whether `owner` cannot reach some of the bound paths, so that they must be mounted for it first"""


class BubblewrapRun(HeldProgram):
    """A program started under bubblewrap. Leaving `stack` kills it."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        settings: BubblewrapSettings,
        folders: Sequence[str],
        program: ProgramSpec,
        confinement: dict[str, Any],
    ) -> None:
        """`confinement`: rlimits and memory limit. Raises SandboxError with bubblewrap's message if it
        fails."""
        self._program = program
        pipes = _Pipes(stack)
        with pipes.theirs:
            request_fd = pipes.hand_over(
                json.dumps({"argv": program.argv, "env": program.env, **confinement}).encode()
            )
            self._reported, report = pipes.from_inside()
            self._stop, stop = pipes.to_inside()
            info, info_inside = pipes.from_inside()
            block, block_inside = pipes.to_inside()
            self._out, out = pipes.from_inside()
            self._err, err = pipes.from_inside()
            plan, sources = settings.plan, [*(source for source, _ in settings.plan["binds"]), *folders]
            if settings.staged:
                targets = [target for _, target in plan["binds"]]
                plan = {
                    **plan,
                    "binds": [(root.staged(n), target) for n, target in enumerate(targets)],
                }
                folders = [root.staged(n) for n in range(len(targets), len(sources))]
            options = bubblewrap_options(plan, folders, pipes.hand_over)
            options += ["--info-fd", str(info_inside), "--block-fd", str(block_inside)]
            arguments = pipes.hand_over(encode_arguments(options))
            start = _START.format(path=root.LAUNCHER_INSIDE, fds=(request_fd, report, stop))
            inside = [settings.python, "-I", "-S", "-X", "utf8", "-c", start]
            argv = [settings.program, "--args", str(arguments), "--", *inside]
            if settings.staged:
                launcher = str(Path(root.__file__).parents[1])
                code = _STAGE.format(path=launcher, call=(settings.owner, sources, argv))
                argv = own_python("-I", "-S", "-X", "utf8", "-c", code)
            self._process = _popen(
                argv, None if settings.staged else settings.owner, streams=(program.stdin, out, err),
                inherited=pipes.handed,
            )  # fmt: skip
        stack.callback(self._reap)
        self._init = self._hold(info)
        stack.callback(os.close, self._init)
        stack.callback(self._end_and_wait)
        # bubblewrap waits until here, so that the pid cannot have been reused before we hold its pidfd
        with contextlib.suppress(BrokenPipeError):
            os.write(block, b"1")

    def _hold(self, info: int) -> int:
        """A pidfd of the jail's pid 1, which is blocked until we let it start."""
        said = b""
        while b"}" not in said and len(said) < _LONGEST_INFO and (chunk := os.read(info, 4096)):
            said += chunk
        try:
            return os.pidfd_open(json.loads(said)["child-pid"])
        except (ValueError, ProcessLookupError) as error:
            self._process.wait()
            Drain({self._err: self._program.err}, self._err).finish()
            raise self._failed() from error

    def _failed(self) -> SandboxError:
        words = self._program.err.value().decode(errors="backslashreplace").strip() or "it said nothing"
        return SandboxError(f"bubblewrap does not start the jail ({words[-300:]})")

    def _report(self) -> Iterable[bytes]:
        self._process.wait()
        with open(self._reported, "rb", closefd=False) as file:
            return file.readlines()

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stop, b"1")

    def _reap(self) -> None:
        self._process.kill()
        self._process.wait()


def _popen(
    argv: list[str], owner: int | None, *, streams: tuple[int, int, int], inherited: list[int]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            # bubblewrap's pid 1 would show our environment to the programs in the jail
            env={},
            cwd="/",
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=inherited,
            user=owner,
            group=owner,
            extra_groups=None if owner is None else [],
            umask=0o022,
        )
    except OSError as error:
        raise SandboxError(f"cannot start {argv[0]} as uid {owner or os.geteuid()}: {error}") from error


class _Pipes:
    """The file descriptors that bubblewrap inherits, and our ends of its pipes."""

    def __init__(self, ours: contextlib.ExitStack) -> None:
        self._ours = ours
        self.theirs = contextlib.ExitStack()
        """closed once bubblewrap has inherited them"""
        self.handed: list[int] = []

    def hand_over(self, data: bytes) -> int:
        return self._hand(seal(data))

    def from_inside(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._ours.callback(os.close, reading)
        return reading, self._hand(writing)

    def to_inside(self) -> tuple[int, int]:
        reading, writing = os.pipe()
        self._ours.callback(os.close, writing)
        return writing, self._hand(reading)

    def _hand(self, fd: int) -> int:
        self.theirs.callback(os.close, fd)
        self.handed.append(fd)
        return fd


_MB = 1 << 20
_PROBE = (
    "import json, sys; sys.path.insert(0, {path!r}); from launcher.runner import attempts; "
    "print(json.dumps(attempts(sys.argv[1])))"
)


class BwrapSandbox:
    name = "bwrap"

    def __init__(self, python: str | None = None, project: Path | None = None) -> None:
        """`python` is the path of the interpreter on the host; None: the running one. `project`: as
        `find_interpreter` has it. Raises SandboxError if bubblewrap is missing or too old, or the interpreter
        cannot be mounted."""
        program = find_bubblewrap()
        interpreter = find_interpreter(python or sys.executable, project)
        self.python = interpreter.path
        self._search_path = interpreter.search_path
        self.lacks = interpreter.lacks
        plan = plan_root(interpreter)
        # bubblewrap started as root keeps host root inside, which may write to /proc/sys
        owner = unused_uid() if os.geteuid() == 0 else None
        self._settings = BubblewrapSettings(
            program=program, plan=plan, python=interpreter.path, owner=owner,
            staged=_staged(owner, plan["binds"]),
        )  # fmt: skip
        self.layers: Mapping[str, bool] = layers(workspace_size=False)

    def with_mount(self, source: Path, target: str) -> BwrapSandbox:
        other, before = copy.copy(self), self._settings
        plan = {**before.plan, "binds": [*before.plan["binds"], (str(source), target)]}
        other._settings = replace(before, plan=plan, staged=_staged(before.owner, plan["binds"]))
        return other

    def open(self, workspace: Path | None, limits: Limits) -> BwrapJail:
        """Raises UsageError for a workspace that cannot be read, SandboxError for an unreachable TMPDIR."""
        check_limits(limits)
        return BwrapJail(self._settings, limits, self._search_path).filled(workspace)


def _staged(owner: int | None, binds: list[tuple[str, str]]) -> bool:
    """Whether `owner` cannot reach some of the bound paths."""
    if owner is None:
        return False
    try:
        with kernel.as_file_user(owner, owner):
            return not all(os.path.exists(source) for source, _ in binds)
    except PermissionError:
        return False  # the user does not exist in this namespace; the start of a program reports it


class BwrapJail(FolderJail):
    def __init__(self, settings: BubblewrapSettings, limits: Limits, search_path: str) -> None:
        super().__init__(limits, settings.python, minimal_environment(search_path), settings.owner)
        self._settings = settings

    def _execute(self, program: ProgramSpec) -> ProgramResult:
        confinement = {"rlimits": rlimits(self._limits), "memory_bytes": self._limits.memory_mb * _MB}
        with contextlib.ExitStack() as stack:
            started = BubblewrapRun(stack, self._settings, (self._work, self._ours), program, confinement)
            with self._ended_by(started.end):
                return started.collect()

    def probe(self, secret: Path) -> dict[str, bool]:
        """Try to escape from inside. Returns layer -> whether it held. `secret` is a file that must not be
        readable."""
        result = self.run_python(_PROBE.format(path=root.LAUNCHER_INSIDE), [str(secret)], isolated=True)
        if not result.ok:
            raise SandboxError(f"the self-test did not run inside the jail: {result}")
        held: dict[str, bool] = json.loads(result.stdout)
        return held
