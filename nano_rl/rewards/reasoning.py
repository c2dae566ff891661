"""`reasoning`: whether what the agent says is true of what it saw, what it did, and what came out.

Deterministic: a claim is something in a thought that can be looked up. One false claim caps the score at a
half, however many true ones stand around it, so that a right answer by flawed steps earns less, and padding
does not help. A run that claims nothing is neither praised nor blamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nano_coder.runtime import Runtime
from nano_rl.rewards.claims import claims_of
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared import snapshot
from nano_shared.types import Trajectory

FLAWED = 0.5
"""a run with a false claim earns at most this"""


@dataclass(frozen=True, slots=True)
class Tally:
    held: int
    failed: int


class Reasoning(Part):
    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        start = snapshot.load(run.snapshot, runtime.store.blobs).entries if run.snapshot else ()
        tally = count_claims(run, [entry.path for entry in start])
        total = tally.held + tally.failed
        if total == 0:
            return SILENT
        share = tally.held / total
        value = 1.0 if tally.failed == 0 else FLAWED * share
        return Score(value=value, details={"claims_held": share})


def count_claims(run: Trajectory, paths: Iterable[str] = ()) -> Tally:
    """Distinct claims over all turns, by whether they hold; a claim is judged by what was shown by then.

    `paths` are the files of the workspace, whose names the first message shows.
    """
    calls = [call for turn in run.turns for call in turn.calls]
    written = "\n".join(text for call in calls for text in (call.name, *map(str, call.arguments.values())))
    seen = "\n".join([run.task.prompt, run.task.check or "", *paths, *run.task.files.values()])
    judged: dict[str, bool] = {}
    for turn in run.turns:
        for claim, holds in claims_of(turn, seen, written, run.answer):
            # a claim that was once wrong stays wrong
            judged[claim] = judged.get(claim, True) and holds
        shown = [observation.text for observation in turn.observations]
        seen = "\n".join([seen, *(str(v) for c in turn.calls for v in c.arguments.values()), *shown])
    held = sum(judged.values())
    return Tally(held=held, failed=len(judged) - held)
