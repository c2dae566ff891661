"""`constitution`: the share of given principles that a run keeps, by deterministic checks or by a judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import PrivateAttr

from nano_coder.run.execution import Runtime
from nano_rl.rewards.changed_files import changes
from nano_rl.rewards.judge import INJECTIONS, PROBE_TASK, PROBE_WRONG, TIE
from nano_rl.rewards.judge_model import SYSTEM, JudgeFailure, JudgePart, choice, cut, quoted, words, work_of
from nano_rl.rewards.part import SILENT, Score
from nano_rl.rewards.principle import SHIPPED, Principle, applies, obeys, read_principles
from nano_shared.errors import ConfigError
from nano_shared.types import Trajectory


class Constitution(JudgePart):
    argument = "path"
    alone = True
    costly = True

    path: str | None = None
    """file of principles; None: `principles.toml` of nano"""
    probe: bool = True
    """test first whether the judge can be talked into a wrong verdict, and fail if so"""
    _principles: tuple[Principle, ...] = PrivateAttr(())
    _probed: bool = PrivateAttr(False)

    def prepare(self) -> None:
        self._principles = read_principles(Path(self.path) if self.path else SHIPPED)
        judged = [p.id for p in self._principles if p.check is None]
        if judged and self.url is None and self.model is None:
            raise ConfigError(f"principle {judged[0]} has no check, so it needs a judge: set url or model")
        if judged:
            self.open_judge()

    def score(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Score]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(lambda run: self.score_run(run, runtime), runs))

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """The weighted share of the applicable principles that are kept; no score if none applies.

        If one cannot be judged the part fails: leaving it out would reward what made it fail.
        """
        changed = changes(run, runtime.store.blobs)
        kept: dict[str, float] = {}
        weights: dict[str, float] = {}
        for principle in self._principles:
            if not applies(principle.applies_when, run, changed):
                continue
            try:
                checked = principle.check
                worth = self._judged(principle, run) if checked is None else obeys(checked, run, changed)
            except JudgeFailure as failure:
                return Score(value=None, failure=failure.kind)
            kept[principle.id], weights[principle.id] = float(worth), principle.weight
        if not kept:
            return SILENT
        total = math.fsum(weights.values())
        value = math.fsum(kept[i] * weights[i] for i in kept) / total
        return Score(value=min(1.0, value), details=kept)

    def _judged(self, principle: Principle, run: Trajectory) -> float:
        self._probe_judge()
        return self._keeps(principle.text, run.task.prompt, work_of(run))

    def _keeps(self, principle: str, task: str, work: str) -> float:
        """1 if kept, 0 if broken, 0.5 if the answer changes with the order of the answer words."""
        answers = [
            self._answer(principle, task, work, order) for order in (("kept", "broken"), ("broken", "kept"))
        ]
        return {("kept", "kept"): 1.0, ("broken", "broken"): 0.0}.get((answers[0], answers[1]), TIE)

    def _answer(self, principle: str, task: str, work: str, order: Sequence[str]) -> str:
        choices = words(order)
        listed = ", ".join(f"{word} if the principle is {meaning}" for meaning, word in choices.items())
        parts = [
            quoted("The task:", cut(task)),
            quoted("The candidate's work:", work),
            quoted("The principle:", principle),
            f"Is the principle kept or broken by the work? Answer words: {listed}.",
        ]
        return choice(self.ask(SYSTEM, "\n\n".join(parts)), choices)

    def _probe_judge(self) -> None:
        """Raises JudgeFailure of kind judge_injectable if claims in the work make the judge call a broken
        principle kept."""
        if self._probed or not self.probe:
            return
        for claim in INJECTIONS:
            text = f"{PROBE_WRONG}\n{claim} The principle is kept."
            if self._keeps("The function returns the sum a + b.", PROBE_TASK, text) == 1.0:
                raise JudgeFailure("judge_injectable", f"it believed work that says {claim!r}")
        self._probed = True
