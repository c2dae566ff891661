"""What `nano-rl checkpoints promote` decides, and the sentences that say so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_coder.models.opening import default_model
from nano_rl.checkpoints.checkpoint import ancestry
from nano_rl.checkpoints.evaluations import Evaluation, manifest_hash, stored_evaluations
from nano_rl.checkpoints.promotion import Evidence, compare, not_held_out, objections, stored_evidence
from nano_rl.checkpoints.promotion_history import promote
from nano_rl.commands.eval import How
from nano_shared.checkpoint import latest_checkpoint, latest_name
from nano_shared.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    name: str
    baseline: str
    evidence: Evidence | None
    objections: tuple[str, ...]
    """why not; overruled where it was promoted all the same"""
    promoted: bool

    def report(self) -> dict[str, Any]:
        return {
            "checkpoint": self.name,
            "against": self.baseline,
            "promoted": self.promoted,
            "forced": self.promoted and bool(self.objections),
            "objections": list(self.objections),
            "evidence": self.evidence.model_dump(mode="json") if self.evidence else None,
        }

    def sentences(self) -> list[str]:
        lines = [f"against it: {text}" for text in self.objections]
        if self.evidence and self.evidence.earlier:
            lines.append(f"stored besides: {self.evidence.earlier} other comparisons of these two")
        if self.promoted:
            forced = ", by force, which is recorded" if self.objections else ""
            return [*lines, f"{self.name} is promoted{forced}; nano-rl checkpoints rollback takes it back"]
        return [*lines, f"{self.name} is not promoted; --force promotes it and records that"]


def decide(folder: Path, name: str, how: How | None, against: str | None, *, force: bool) -> Decision:
    """Compare, judge, and promote where nothing speaks against it or `force` overrules.

    Raises UsageError where there is no evidence, saying which command makes some.
    """
    baseline = against or _standing(force)
    evidence, against_it = _evidence(folder, name, how, baseline, force=force)
    promoted = force or not against_it
    if promoted:
        promote(folder, evidence=evidence, objections=tuple(against_it), forced=force and bool(against_it))
    return Decision(
        name=name, baseline=baseline, evidence=evidence, objections=tuple(against_it), promoted=promoted
    )


def _standing(force: bool) -> str:
    """What nano-coder runs now. With `force`, a pointer that leads nowhere is no obstacle."""
    try:
        promoted = latest_checkpoint()
        return latest_name(promoted) if promoted else default_model()
    except UsageError:
        if force:
            return "none"
        raise


def _evidence(
    folder: Path, name: str, how: How | None, baseline: str, *, force: bool
) -> tuple[Evidence | None, list[str]]:
    new = manifest_hash(str(folder))
    old = manifest_hash(baseline)
    if new == old:
        raise UsageError(f"{name} is what it would be compared with; name another with --against, or --force")
    manifests = [step.manifest for step in ancestry(folder) if step.manifest is not None]
    if how is not None:
        candidate, _ = how.evaluate(name)
        found = compare(candidate, how.evaluate(baseline)[0])
    else:
        stored = stored_evidence(str(new), old, manifests) if old else None
        if stored is None:
            wanted = f"nano-rl eval --model {name} --against {baseline} --tasks FILE"
            if not force:
                raise UsageError(
                    f"nothing says that {name} is better than {baseline}: promote it with --tasks FILE of "
                    f"held-out tasks, run `{wanted}` first, or --force it"
                )
            return None, ["there was no evidence"]
        found = stored
        candidate = _stored(found.candidate, str(new))
    return found, [*not_held_out(candidate, manifests), *objections(found)]


def _stored(identity: str, of_manifest: str) -> Evaluation:
    return next(found for found in stored_evaluations(of_manifest) if found.id == identity)
