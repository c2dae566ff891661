"""A run with everything that the log holds of it."""

from __future__ import annotations

import json
from typing import Any

from nano_shared.feedback import Feedback
from nano_shared.types import Trajectory, Value, Verdict


class LoggedRun(Value):
    trajectory: Trajectory
    verdicts: tuple[Verdict, ...] = ()
    """every verdict, newest last; the last one is the trajectory's"""
    feedback: tuple[Feedback, ...] = ()

    @property
    def whole(self) -> Trajectory:
        """The trajectory with the newest of `verdicts`."""
        return self.trajectory.model_copy(update={"verdict": self.verdicts[-1] if self.verdicts else None})

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values. (Pydantic's JSON mode loses half surrogates in keys of objects.)"""
        body: dict[str, Any] = json.loads(json.dumps(self.model_dump()))
        return body
