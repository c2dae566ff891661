"""A format of runs: what was asked, said and seen, as one text a run."""

from collections.abc import Sequence
from typing import Any

from nano_coder.run_formats import RunFormat
from nano_shared.logged_run import LoggedRun
from nano_shared.types import Message


def write_run(
    run: LoggedRun, opening: Sequence[Message] | None, tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    lines = [run.trajectory.task.prompt]
    for turn in run.trajectory.turns:
        lines += [turn.completion.text, *(observation.text for observation in turn.observations)]
    return {"id": run.trajectory.id, "text": "\n".join(lines)}


PROSE = RunFormat(name="prose", write_run=write_run)
