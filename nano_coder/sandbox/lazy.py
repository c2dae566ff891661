"""A jail opened when it is first needed: a run that only calculates and submits never pays for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from nano_coder.sandbox.protocol import ExecResult, Jail, RunOptions


class LazyJail:
    """The Jail that `opener` makes, made on first use. Raises what the opener raises, then."""

    def __init__(self, opener: Callable[[], Jail]) -> None:
        self._opener = opener
        self._jail: Jail | None = None

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

    def close(self) -> None:
        if self._jail is not None:
            self._jail.close()

    def _open(self) -> Jail:
        if self._jail is None:
            self._jail = self._opener()
        return self._jail
