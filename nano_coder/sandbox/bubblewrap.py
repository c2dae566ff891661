"""Isolation by the distribution's bubblewrap, for machines that let it make namespaces but not us.

A run is a jail of its own, over a workspace in a private directory of the host: no jail waits warm, and the
room of the workspace is the host's. The other layers are those of the default backend.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nano_coder.sandbox.bubblewrap_process import Wrapped, Wrapper
from nano_coder.sandbox.bubblewrap_program import find_bubblewrap
from nano_coder.sandbox.folder_jail import Ending, FolderJail, Program
from nano_coder.sandbox.interpreter import find_interpreter
from nano_coder.sandbox.launcher import kernel, root
from nano_coder.sandbox.request import check_limits
from nano_coder.sandbox.root_plan import layers, plan_root, rlimits, unused_uid
from nano_shared.errors import SandboxError
from nano_shared.types import Limits

_MB = 1 << 20
_PROBE = (
    "import json, sys; sys.path.insert(0, {path!r}); from launcher.probe import attempts; "
    "print(json.dumps(attempts(sys.argv[1])))"
)


class BwrapSandbox:
    name = "bwrap"

    def __init__(self, python: str | None = None) -> None:
        """`python` is the interpreter's path on the host; None is the one that runs this.

        Raises SandboxError where bubblewrap is missing or too old, or the interpreter cannot be mounted.
        """
        program = find_bubblewrap()
        interpreter = find_interpreter(python or sys.executable)
        self.python = interpreter.path
        self._search_path = interpreter.search_path
        plan = plan_root(interpreter)
        # as root it would keep host root inside, which may write to /proc/sys
        owner = unused_uid() if os.geteuid() == 0 else None
        self._wrapper = Wrapper(
            program=program,
            plan=plan,
            python=interpreter.path,
            owner=owner,
            staged=_staged(owner, plan["binds"]),
        )
        self.layers: Mapping[str, bool] = layers(workspace_size=False)

    def showing(self, source: Path, target: str) -> BwrapSandbox:
        other, before = copy.copy(self), self._wrapper
        plan = {**before.plan, "binds": [*before.plan["binds"], (str(source), target)]}
        other._wrapper = replace(before, plan=plan, staged=_staged(before.owner, plan["binds"]))
        return other

    def open(self, workspace: Path | None, limits: Limits) -> BwrapJail:
        """Raises UsageError for a workspace that cannot be read, SandboxError for an unreachable TMPDIR."""
        check_limits(limits)
        return BwrapJail(self._wrapper, limits, self._search_path).filled(workspace)


def _staged(owner: int | None, binds: list[tuple[str, str]]) -> bool:
    """Whether `owner` cannot reach everything that is bound."""
    if owner is None:
        return False
    try:
        with kernel.as_file_user(owner, owner):
            return not all(os.path.exists(source) for source, _ in binds)
    except PermissionError:
        return False  # the user is unknown here, which will be said when a program is to run as it


class BwrapJail(FolderJail):
    def __init__(self, wrapper: Wrapper, limits: Limits, search_path: str) -> None:
        super().__init__(limits, wrapper.python, search_path, wrapper.owner)
        self._wrapper = wrapper

    def _execute(self, program: Program) -> Ending:
        confinement = {"rlimits": rlimits(self._limits), "memory_bytes": self._limits.memory_mb * _MB}
        with contextlib.ExitStack() as stack:
            wrapped = Wrapped(stack, self._wrapper, self._work, program, confinement)
            with self._ended_by(wrapped.end):
                return wrapped.collect()

    def probe(self, secret: Path) -> dict[str, bool]:
        """Try to escape from inside: layer -> whether it held. `secret` must not be readable."""
        result = self.run_python(_PROBE.format(path=root.LAUNCHER_INSIDE), [str(secret)], isolated=True)
        if not result.ok:
            raise SandboxError(f"the self-test did not run inside the jail: {result}")
        held: dict[str, bool] = json.loads(result.stdout)
        return held
