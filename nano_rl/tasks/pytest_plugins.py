"""Runs the tests of generated tasks without the pytest plugins that are installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import Sandbox, SupportsListening, SupportsMounts, connected
from nano_shared.errors import UsageError
from nano_shared.types import Limits, Task

_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def runtime_for(task: Task, runtime: Runtime) -> Runtime:
    """The runtime for a task: without pytest plugins for a generated task; other tasks may need them."""
    if task.provenance.source != "generated":
        return runtime
    return replace(runtime, sandbox=PluginsOff(runtime.sandbox))


class PluginsOff:
    """A sandbox that disables the autoloading of pytest plugins by an environment variable."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name: str = inner.name
        self.layers: Mapping[str, bool] = inner.layers
        self.python: str = inner.python

    def with_hosts(self, hosts: frozenset[str]) -> PluginsOff:
        return PluginsOff(connected(self._inner, hosts))

    def open(self, workspace: Path | None, limits: Limits) -> Any:
        return _Jail(self._inner.open(workspace, limits))

    def with_mount(self, source: Path, target: str) -> PluginsOff:
        return PluginsOff(self._able(SupportsMounts, "show folders to an agent").with_mount(source, target))

    def open_listening(self, workspace: Path | None, limits: Limits) -> Any:
        inner = self._able(SupportsListening, "open a way from an agent to its model")
        jail, listener = inner.open_listening(workspace, limits)
        return _Jail(jail), listener

    def _able(self, kind: Any, what: str) -> Any:
        """The sandbox inside. Raises UsageError if it lacks what an agent of others needs."""
        if not isinstance(self._inner, kind):
            raise UsageError(f"the sandbox {self.name!r} cannot {what}; use ns")
        return self._inner


class _Jail:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def run(self, argv: Sequence[str], **options: Any) -> Any:
        return self._inner.run(argv, **{**options, "env": {**_ENVIRONMENT, **options.get("env", {})}})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
