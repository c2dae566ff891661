"""A sandbox: nano's own, which tells of every jail that it opens."""

import sys
from pathlib import Path

from nano_coder.sandbox.protocol import Jail, open_sandbox
from nano_shared.types import Limits


class Announced:
    name = "announced"

    def __init__(self, python: str | None) -> None:
        self._inner = open_sandbox("ns", python=python)
        self.layers = self._inner.layers
        self.python = self._inner.python

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        print(f"a jail with {limits.memory_mb} MiB", file=sys.stderr)
        return self._inner.open(workspace, limits)
