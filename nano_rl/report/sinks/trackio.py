"""trackio: a local dashboard with W&B's calls; a run of one name for a training, also when it is resumed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

PROJECT = "nano"


class TrackioSink:
    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._settings = dict(settings)
        self._run: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            import trackio

            with redirect_stdout(sys.stderr):  # it announces the run, and our stdout is for results
                self._run = trackio.init(
                    project=PROJECT, name=self._name, resume="allow", config=self._settings
                )
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            import trackio

            with redirect_stdout(sys.stderr):
                trackio.finish()


def open_sink(name: str, folder: Path, settings: Mapping[str, Any]) -> TrackioSink:
    import trackio  # noqa: F401 (fails now rather than at the first row)

    return TrackioSink(name, settings)
