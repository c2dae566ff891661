"""Controls of an objective: what it changes from step to step, by the step and by what was measured.

An objective names them (`Objective.controls`); the recipe has none. Each is a function of the values of the
step before, its metrics and the number of the step, so that a resumed training goes on as if it had not been
stopped.

    TemperatureSchedule   the temperature of rollouts along a line or half a cosine
    EntropyTarget         entropy bonus, raised while the entropy is below a target (arXiv 2505.22312)
    AdaptiveKL            beta, so that the KL to the reference stays near a target (arXiv 1909.08593)
    ReferenceRefresh      the current policy becomes the reference (arXiv 2505.24864)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from nano_rl.learn.config import ObjectiveConfig, find_objective
from nano_shared.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """The values of one step that controls may change."""

    temperature: float
    entropy_bonus: float
    beta: float
    refresh: bool = False
    """the policy before this step becomes the reference"""
    memory: Mapping[str, float] = field(default_factory=dict)
    """what a control remembers, by a name of its own"""


@dataclass(frozen=True, kw_only=True)
class Control:
    """Base of controls."""

    rollouts: ClassVar[bool] = False
    """it changes how rollouts are sampled"""
    reference: ClassVar[bool] = False
    """it needs a reference, that is a beta above 0"""

    def advance(self, now: Controlled, metrics: Mapping[str, float], step: int) -> Controlled:
        """The values of `step`, from those of the step before and its metrics, which are empty at the first
        step; a step without an update has no metrics of the loss."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TemperatureSchedule(Control):
    """From `start` to `end` over `steps` steps, then `end`."""

    rollouts = True
    start: float
    end: float
    steps: int
    shape: Literal["linear", "cosine"] = "linear"

    def advance(self, now: Controlled, metrics: Mapping[str, float], step: int) -> Controlled:
        done = min(step / max(1, self.steps), 1.0)
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return replace(now, temperature=self.start + done * (self.end - self.start))


@dataclass(frozen=True, kw_only=True)
class EntropyTarget(Control):
    """A coefficient moves by `rate` a step, up while the entropy is below `target` nats and down above it,
    never below 0; it is the entropy bonus of steps after one below the target."""

    target: float
    rate: float = 0.005
    most: float = 1.0

    def advance(self, now: Controlled, metrics: Mapping[str, float], step: int) -> Controlled:
        if "entropy" not in metrics:
            return now
        low = metrics["entropy"] <= self.target
        moved = now.memory.get("entropy", now.entropy_bonus) + (self.rate if low else -self.rate)
        kept = min(max(moved, 0.0), self.most)
        return replace(now, entropy_bonus=kept if low else 0.0, memory={**now.memory, "entropy": kept})


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL(Control):
    """beta moves by up to `gain` of itself: up where the KL is above `target` nats a token, else down."""

    reference = True
    target: float
    gain: float = 0.1
    most: float = 10.0

    def advance(self, now: Controlled, metrics: Mapping[str, float], step: int) -> Controlled:
        if not math.isfinite(metrics.get("kl_reference", math.nan)):
            return now
        error = min(max(metrics["kl_reference"] / self.target - 1, -1.0), 1.0)
        return replace(now, beta=min(now.beta * (1 + self.gain * error), self.most))


@dataclass(frozen=True, kw_only=True)
class ReferenceRefresh(Control):
    """Every `every` steps."""

    reference = True
    every: int

    def advance(self, now: Controlled, metrics: Mapping[str, float], step: int) -> Controlled:
        return replace(now, refresh=step > 0 and step % self.every == 0)


class Controls:
    """The controls of an objective over a training; part of its saved state."""

    def __init__(self, objective: ObjectiveConfig, temperature: float, *, ahead: bool = False) -> None:
        """`ahead`: rollouts begin before the step that learns from them. Raises UsageError for a control that
        needs what the settings do not give."""
        self._controls = find_objective(objective.objective).controls
        for control in self._controls:
            name = f"{type(control).__name__} of objective = {objective.objective}"
            if control.reference and objective.beta == 0:
                raise UsageError(f"{name} needs a reference: set objective.beta above 0")
            if control.rollouts and ahead:
                raise UsageError(
                    f"{name} changes rollouts, which `asynchronous` begins a step earlier: leave one out"
                )
        self.now = Controlled(
            temperature=temperature, entropy_bonus=objective.entropy_bonus, beta=objective.beta
        )
        self._advance({}, 0)

    def __bool__(self) -> bool:
        return bool(self._controls)

    def applied(self, objective: ObjectiveConfig) -> ObjectiveConfig:
        """The objective of the current step."""
        if not self:
            return objective
        return objective.model_copy(update={"entropy_bonus": self.now.entropy_bonus, "beta": self.now.beta})

    def after(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Go on to `step`, after one with these metrics. Returns the values of the step that is over."""
        if not self:
            return {}
        used = {name: getattr(self.now, name) for name in ("temperature", "entropy_bonus", "beta")}
        self._advance(metrics, step)
        return used

    def _advance(self, metrics: Mapping[str, float], step: int) -> None:
        for control in self._controls:
            self.now = control.advance(self.now, metrics, step)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.now)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.now = Controlled(**state_dict)
