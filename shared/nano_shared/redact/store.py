"""A log that keeps no secrets: what it is given is scrubbed before it is written."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from nano_shared.errors import LogError
from nano_shared.feedback import Feedback, Said
from nano_shared.redact.files import scrub_bytes
from nano_shared.redact.known import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.redact.tokens import Decode, mask_turns
from nano_shared.redact.trajectory import learn, scrub_trajectory, scrub_value
from nano_shared.store import LogStore
from nano_shared.types import Trajectory, Turn, Verdict


@dataclass(slots=True)
class _Run:
    known: Known = field(default_factory=Known)
    turns: list[Turn] = field(default_factory=list)
    """as they happened: a row is looked at whole, whatever turn a secret began in"""


class RedactingStore(LogStore):
    """The same log, scrubbed on write; who executes a run keeps it as it happened, in memory.

    A turn is written before the next one happens, so a secret that only a later turn gives away stays in the
    earlier ones; `nano-coder log redact` looks at a run whole. Snapshots and the files in them are not
    touched: undo, apply, grading and resuming need them as they were. Full outputs of tools are scrubbed.
    """

    def __init__(self, store: LogStore, redactor: Redactor, decode: Decode | None) -> None:
        super().__init__(store._database, store.blobs)
        self.redactor = redactor
        self._decode = decode
        self._runs: dict[str, _Run] = {}
        self._lock = threading.Lock()

    def begin(self, trajectory: Trajectory) -> None:
        run = self._of(trajectory.id)
        learn(trajectory, self.redactor, run.known)
        if trajectory.turns:  # a fork's, of another run
            run.turns = list(trajectory.turns)
            trajectory = scrub_trajectory(
                trajectory, redactor=self.redactor, decode=self._decode, blobs=self.blobs
            )
        super().begin(scrub_value(trajectory, self.redactor, run.known))

    def append_turn(self, run_id: str, turn: Turn) -> None:
        run = self._of(run_id)
        learn(turn, self.redactor, run.known)
        for observation in turn.observations:
            if observation.blob is not None:
                self._learn_output(observation.blob, run)
        run.turns.append(turn)
        super().append_turn(run_id, scrub_value(self._masked(run), self.redactor, run.known))

    def finish(self, run_id: str, **end: Any) -> None:
        run = self._of(run_id)
        learn(tuple(end.values()), self.redactor, run.known)
        scrubbed = {name: scrub_value(value, self.redactor, run.known) for name, value in end.items()}
        super().finish(run_id, **scrubbed)

    def append(self, trajectory: Trajectory) -> None:
        super().append(
            scrub_trajectory(trajectory, redactor=self.redactor, decode=self._decode, blobs=self.blobs)
        )

    def add_verdict(self, run_id: str, verdict: Verdict) -> None:
        super().add_verdict(run_id, self._scrubbed(run_id, verdict))
        with self._lock:
            self._runs.pop(run_id, None)

    def add_feedback(self, run_id: str, *feedback: Feedback) -> list[Said]:
        return super().add_feedback(run_id, *(self._scrubbed(run_id, row) for row in feedback))

    def put_blob(self, data: bytes) -> str:
        """Store the full output of a tool, scrubbed."""
        return super().put_blob(scrub_bytes(data, self.redactor))

    def _masked(self, run: _Run) -> Turn:
        """The newest turn with its ids masked where its row, so far, spells a secret."""
        turn = run.turns[-1]
        if turn.completion.tokens is None:
            return turn
        if self._decode is None and not self._tells(run):
            return turn
        return mask_turns(run.turns, self._decode, self.redactor, run.known)[-1]

    def _tells(self, run: _Run) -> bool:
        """Whether the turns so far hold a secret in a text: then, without a decoder, all ids are masked."""
        turns = tuple(run.turns)
        return scrub_value(turns, self.redactor, run.known) != turns

    def _learn_output(self, blob: str, run: _Run) -> None:
        try:
            run.known.add(self.redactor.secrets(self.get_blob(blob).decode("utf-8", "replace")))
        except LogError:
            return  # nothing of it can be in the log then

    def _scrubbed(self, run_id: str, value: Any) -> Any:
        run = self._of(run_id)
        learn(value, self.redactor, run.known)
        return scrub_value(value, self.redactor, run.known)

    def _of(self, run_id: str) -> _Run:
        with self._lock:
            return self._runs.setdefault(run_id, _Run())
