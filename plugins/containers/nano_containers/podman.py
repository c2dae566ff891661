"""The podman backend, for tasks that name a container image: each program runs in a container of its own.

The image's root is read-only, and the workspace, a private directory of the host, is at /work. Pid 1 is ours:
nano's Python with its libraries is mounted beside the image's, so that images without one run too, and
programs get the filter, rlimits, memory watch and report of the other backends. An image is never pulled.
"""

from __future__ import annotations

import contextlib
import copy
import getpass
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from nano_coder.sandbox.jail_request import check_limits, minimal_environment
from nano_coder.sandbox.launcher import files, root
from nano_coder.sandbox.protocol import ExecResult, RunOptions
from nano_coder.sandbox.root_plan import PROCESSES, layers, rlimits
from nano_containers.container import (
    PATIENCE_S,
    SEARCHED,
    ContainerRun,
    PythonStart,
    carried_python,
    podman_environment,
)
from nano_containers.folder_jail import FolderJail, ProgramResult, ProgramSpec
from nano_shared.errors import SandboxError, UsageError
from nano_shared.files import scratch_folder
from nano_shared.types import Limits

FIRST_UID = 0x7800_0000 - 65_536
"""as root: host uid of uid 0 in the containers; below the uids of the jails of `ns`"""
_IDS = 65_536
_TMP_MB, _SHM_MB = 256, 64
_MB = 1 << 20
_BESIDE_MB = 64
"""memory of a container beside its program: our pid 1, and kernel memory"""
_INSTALL = "sudo apt-get install podman runc uidmap"
_NO_IMAGE = (
    "the sandbox 'podman' runs programs in a container image: name one with --container-image, or NANO_IMAGE"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodmanEngine:
    """How podman runs containers on this machine."""

    command: tuple[str, ...]
    """podman with its global options"""
    owner: int | None
    """host uid and gid of uid 0 in the containers, if we are root; else it is the caller's"""
    ids: int
    """number of uids and gids in a container"""
    cgroups: bool
    """whether the kernel's limits of memory and processes hold"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImage:
    name: str
    id: str
    environment: Mapping[str, str]
    """the variables that the image sets"""


def find_podman() -> PodmanEngine:
    """Raises SandboxError, with the remedy, for what is missing to run containers."""
    program = shutil.which("podman", path=SEARCHED)
    if program is None:
        raise SandboxError(f"the sandbox 'podman' needs podman; install it: {_INSTALL}")
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        command: tuple[str, ...] = (program,)
    elif shutil.which("runc", path=SEARCHED) is None:
        raise SandboxError(
            "the sandbox 'podman' needs runc, since crun starts no container under version 1 of control "
            f"groups; install it: {_INSTALL}"
        )
    else:
        command = (program, "--runtime", "runc", "--cgroup-manager", "cgroupfs")
    if os.geteuid() == 0:
        return PodmanEngine(command=command, owner=FIRST_UID, ids=_IDS, cgroups=True)
    return PodmanEngine(command=command, owner=None, ids=1 + _subordinate_ids(), cgroups=len(command) == 1)


def _subordinate_ids() -> int:
    """How many an ordinary user has, uids and gids. Raises SandboxError."""
    user, counts = getpass.getuser(), [_IDS]
    if shutil.which("newuidmap", path=SEARCHED) is None:
        raise SandboxError(f"podman needs newuidmap for an ordinary user; install it: {_INSTALL}")
    for file in ("/etc/subuid", "/etc/subgid"):
        lines = [line.split(":") for line in Path(file).read_text().split()] if os.path.exists(file) else []
        counts.append(sum(int(line[2]) for line in lines if line[0] in (user, str(os.geteuid()))))
    if min(counts) == 0:
        raise SandboxError(
            f"podman needs subordinate ids for {user!r} in /etc/subuid and /etc/subgid: "
            f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
        )
    return min(counts)


def inspect_image(engine: PodmanEngine, name: str) -> ContainerImage:
    """Raises SandboxError, with the remedy, for an image that this machine lacks."""
    argv = [*engine.command, "image", "inspect", "--", name]
    try:
        done = subprocess.run(
            argv, env=podman_environment(), cwd="/", capture_output=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise SandboxError(
            f"podman did not answer within {PATIENCE_S:.0f} s when asked for {name!r}"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="backslashreplace").strip().splitlines()
        if said and any(word in said[-1] for word in ("no such image", "not known", "no such object")):
            raise SandboxError(
                f"podman has no image {name!r} here, and none is pulled unasked: podman pull {name} gets it, "
                "podman build or podman load makes it"
            )
        raise SandboxError(f"podman cannot look for {name!r} ({said[-1] if said else 'it said nothing'})")
    image = json.loads(done.stdout)[0]
    pairs = (entry.partition("=") for entry in image["Config"].get("Env") or ())
    return ContainerImage(name=name, id=image["Id"], environment={key: value for key, _, value in pairs})


# ---------------------------------------------------------------------------------------- the backend

_told_of_limits = False


def _tell_of_limits() -> None:
    global _told_of_limits
    if not _told_of_limits:
        _told_of_limits = True
        print(
            "sandbox: podman gives the containers of an ordinary user no control group under version 1 of "
            "control groups; rlimits and the memory watch bound them",
            file=sys.stderr,
        )


class PodmanSandbox:
    name = "podman"

    def __init__(self, python: str | None = None) -> None:
        """`python` is an interpreter's path in the image; None: its python3, else nano's own, mounted. Raises
        SandboxError, with the remedy, if podman or a part of it is missing."""
        self._engine = find_podman()
        self._named = python
        self.python = python or "python3"
        self._image: ContainerImage | None = None
        self._binds: tuple[tuple[str, str], ...] = carried_python().binds
        self._start = PythonStart(None)
        self.layers: Mapping[str, bool] = layers(workspace_size=False, cgroup=self._engine.cgroups)
        if not self._engine.cgroups:
            _tell_of_limits()

    def with_image(self, name: str | None) -> PodmanSandbox:
        """An image is proved by a trial escape, once per process. Raises SandboxError if that succeeds."""
        if self._image is not None and name in (None, self._image.name):
            return self
        if name is None:
            raise UsageError(_NO_IMAGE)
        other = copy.copy(self)
        image = other._image = inspect_image(self._engine, name)
        with _lock:
            if image.id not in _proved:
                other._start = PythonStart(None)  # nano's own
                _proved[image.id] = _prove(other)
        proof = _proved[image.id]
        other.python = self._named or proof.python or "python3"
        other._start = PythonStart(self._named or proof.python, modern=proof.modern)
        return other

    def with_mount(self, source: Path, target: str) -> PodmanSandbox:
        other = copy.copy(self)
        other._binds = (*self._binds, (str(source), target))
        return other

    def open(self, workspace: Path | None, limits: Limits) -> PodmanJail:
        """Raises UsageError without an image and for a workspace that cannot be read, SandboxError for an
        unreachable TMPDIR."""
        check_limits(limits)
        if self._image is None:
            raise UsageError(_NO_IMAGE)
        return PodmanJail(self._engine, self._image, self._binds, self._start, limits).filled(workspace)


_PROBE = """
import json, shutil, subprocess, sys
sys.path.insert(0, {path!r})
from launcher.runner import attempts
held = attempts(sys.argv[1], 0)
python = shutil.which("python3")
code = "import sys; print(sys.version_info >= (3, 11))"
said = subprocess.run([python, "-I", "-c", code], capture_output=True).stdout if python else b""
print(json.dumps({{"held": held, "python": python if said else None, "modern": said[:4] == b"True"}}))
"""


@dataclass(frozen=True, slots=True)
class _Proof:
    held: Mapping[str, bool]
    python: str | None
    modern: bool


_proved: dict[str, _Proof] = {}
_lock = threading.Lock()


def _prove(sandbox: PodmanSandbox) -> _Proof:
    """Try to escape from a container of the image, and look for its Python. Raises SandboxError with the
    layer that failed."""
    with scratch_folder("canary") as outside, closing(sandbox.open(None, Limits())) as jail:
        canary = outside / "canary"
        canary.write_bytes(b"secret")
        proof = jail.prove(canary)
    for layer, held in proof.held.items():
        if not held:
            raise SandboxError(
                f"podman's containers do not hold {layer!r} here: a trial escape succeeded; use --sandbox ns"
            )
    return proof


class PodmanJail(FolderJail):
    def __init__(
        self,
        engine: PodmanEngine,
        image: ContainerImage,
        binds: Sequence[tuple[str, str]],
        start: PythonStart,
        limits: Limits,
    ) -> None:
        usual = minimal_environment(image.environment.get("PATH", "/usr/local/bin:/usr/bin:/bin"))
        super().__init__(limits, start.path or "python3", {**usual, **image.environment}, engine.owner)
        self._engine, self._image, self._binds, self._start = engine, image, binds, start

    def run_python(
        self,
        source: str,
        argv: Sequence[str] = (),
        *,
        isolated: bool = False,
        **options: Unpack[RunOptions],
    ) -> ExecResult:
        program, variables = self._start.program(source, argv, isolated=isolated)
        options["env"] = {**variables, **options.get("env", {})}
        return self.run(program, **options)

    def _execute(self, program: ProgramSpec) -> ProgramResult:
        request = {"rlimits": rlimits(self._limits), "memory_bytes": self._limits.memory_mb * _MB}
        with contextlib.ExitStack() as stack:
            started = ContainerRun(stack, self._command(), program, request)
            with self._ended_by(started.end):
                return started.collect()

    def _command(self) -> list[str]:
        """podman's command line: options, image, and what pid 1 runs."""
        carried = carried_python()
        given = ["run", "--rm", "--pull=never", "--log-driver=none", "--network=none", "--no-hosts"]
        given += ["--read-only", "--read-only-tmpfs=false", "--image-volume=ignore", "--systemd=false"]
        given += ["--no-healthcheck", "--cap-drop=all", "--security-opt=no-new-privileges", "--user=0:0"]
        given += ["--security-opt=mask=/sys/kernel:/sys/firmware:/sys/devices:/sys/class"]
        # a user namespace of its own, in which the kernel counts the processes of a uid
        given += [f"--{kind}map=0:{self._engine.owner or 0}:{self._engine.ids}" for kind in ("uid", "gid")]
        # the limits of a shell may be beyond what podman may set
        given += ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024", "--hostname=sandbox"]
        given += [f"--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={_TMP_MB}m", f"--shm-size={_SHM_MB}m"]
        given += [f"--volume={self._work}:/work:rw,nosuid,nodev", "--workdir=/work"]
        given += [f"--volume={self._ours}:{files.STATE}:rw,nosuid,nodev"]
        given += [f"--volume={source}:{target}:ro,nosuid,nodev" for source, target in self._binds]
        given += ["--unsetenv-all", *(f"--env={name}={value}" for name, value in carried.environment.items())]
        if self._engine.cgroups:
            memory = f"{self._limits.memory_mb + _BESIDE_MB}m"
            given += [f"--memory={memory}", f"--memory-swap={memory}"]
            given += [f"--pids-limit={(self._limits.processes or PROCESSES) + 2}"]
        given += [f"--preserve-fds={ContainerRun.GIVEN}", f"--entrypoint={json.dumps(carried.argv)}"]
        return [*self._engine.command, *given, self._image.id, *ContainerRun.PID_1]

    def prove(self, secret: Path) -> _Proof:
        """Try to escape from inside. `secret` is a file that must not be readable."""
        result = self.run_python(_PROBE.format(path=root.LAUNCHER_INSIDE), [str(secret)])
        if not result.ok:
            said = (result.stderr or result.stdout).decode(errors="backslashreplace").strip()[-300:]
            raise SandboxError(f"the self-test did not run in a container of {self._image.name!r} ({said})")
        return _Proof(**json.loads(result.stdout))
