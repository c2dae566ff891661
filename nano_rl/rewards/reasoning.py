"""`reasoning`: whether what the agent says is true of what it saw, what it did, and what came out.

Deterministic: a claim is something in a thought that can be looked up. One false claim caps the score at a
half, however many true ones stand around it, so that a right answer by flawed steps earns less, and padding
does not help. A run that claims nothing is neither praised nor blamed.
"""

from __future__ import annotations

from dataclasses import dataclass

from nano_coder.runtime import Runtime
from nano_rl.rewards.claims import claims_of
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory

FLAWED = 0.5
"""a run with a false claim earns at most this"""


@dataclass(frozen=True, slots=True)
class Tally:
    held: int
    failed: int


class Reasoning(Part):
    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        tally = count_claims(run)
        total = tally.held + tally.failed
        if total == 0:
            return SILENT
        share = tally.held / total
        value = 1.0 if tally.failed == 0 else FLAWED * share
        return Score(value=value, details={"claims_held": share})


def count_claims(run: Trajectory) -> Tally:
    """Distinct claims over all turns, by whether they hold; a claim is judged by what was known by then."""
    seen = "\n".join([run.task.prompt, run.task.check or "", *run.task.files, *run.task.files.values()])
    judged: dict[str, bool] = {}
    for turn in run.turns:
        for claim, holds in claims_of(turn, seen, run.answer):
            # a claim that was once wrong stays wrong
            judged[claim] = judged.get(claim, True) and holds
        written = [str(v) for call in turn.calls for v in call.arguments.values()]
        seen = "\n".join([seen, *written, *(o.text for o in turn.observations)])
    held = sum(judged.values())
    return Tally(held=held, failed=len(judged) - held)
