"""Deep verification: certifies a run with the weights that sampled it.

Its tokens must be what the template renders and the texts spell (`tokens.py`), and its log-probs those that
the weights compute again (`logprobs.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.verify.logprobs import MAX_GAP, MEAN_GAP, TURN_GAP, Gap, logprob_gap
from nano_coder.verify.refusal_codes import RefusalCode
from nano_coder.verify.tokens import TokenCheck
from nano_coder.verify.trainable import RunFinding
from nano_coder.verify.trainable import findings as judge
from nano_shared.errors import NanoError, UsageError
from nano_shared.run_facts import RunFacts
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


class NotAtHand(UsageError):
    """The weights that sampled a run are not available here, or differ from those under its policy's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of deep verification of one run."""

    run: str
    policy: str
    policy_id: str
    dtype: str | None
    """of the weights that `gap` was computed with; None if it was not computed"""
    gap: Gap | None
    findings: tuple[RunFinding, ...]
    """what is wrong; empty for a certified run"""

    @property
    def certified(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        bounds = {"relative_mean": MEAN_GAP, "worst_turn_mean": TURN_GAP}
        if self.dtype == "float32":
            bounds = {"max": MAX_GAP}
        return {
            "certified": self.certified,
            "policy": self.policy,
            "policy_id": self.policy_id,
            "dtype": self.dtype,
            "difference": asdict(self.gap) if self.gap else None,
            "bounds": bounds,
            "damage": [finding.as_dict() for finding in self.findings],
        }


def deep_verify(facts: RunFacts, store: LogStore, *, model: str | None = None) -> Certificate:
    """Certify a run, or say why not. `model` names its policy's weights, if not by the recorded name.

    Raises NotAtHand if the weights are not available, or other weights have that name.
    """
    name = model or facts.policy
    damage = tuple(f for f in judge(facts) if f.blocks and RefusalCode(f.kind) in _UNCERTIFIABLE)
    if damage:
        named = facts.turns[0].policy_id if facts.turns else ""
        return Certificate(run=facts.id, policy=name, policy_id=named, dtype=None, gap=None, findings=damage)
    run = store.get(facts.id)
    opened = _opened(name, run, "float32")
    policy = local_policy(opened.loaded, opened.profile, version=opened.version)
    check = TokenCheck(template=policy.template, eos_ids=opened.loaded.eos_ids, blobs=store.blobs)
    findings = check.findings(run)
    if policy.template_hash != run.template_hash:
        findings = [
            RunFinding(True, RefusalCode.ANOTHER_TEMPLATE.value, "it was made under another chat template"),
            *findings,
        ]
    dtype = "float32"
    gap = logprob_gap(run, policy.engine)
    if not gap.exact:  # the log does not record the dtype of sampling, which is bfloat16 for larger models
        rounded = _opened(name, run, "bfloat16")
        dtype, gap = "bfloat16", logprob_gap(run, local_policy(rounded.loaded, rounded.profile).engine)
        if not gap.close:
            findings.append(_far(gap))
    return Certificate(
        run=run.id, policy=name, policy_id=opened.loaded.id, dtype=dtype, gap=gap, findings=tuple(findings)
    )


_UNCERTIFIABLE = frozenset(
    {code for code in RefusalCode if code.damage}
    - {RefusalCode.OURS_SCORED, RefusalCode.FOREIGN_VERDICT, RefusalCode.OTHER_TOOLS}
) | {RefusalCode.TEXT_ONLY, RefusalCode.NO_TURNS, RefusalCode.REDACTED}
"""findings after which nothing can be recomputed"""


def _far(gap: Gap) -> RunFinding:
    return RunFinding(
        True,
        RefusalCode.OTHER_LOGPROBS.value,
        f"its log-probs are {gap.mean:.2g} nats from the policy's in the mean and {gap.max:.2g} at most;"
        f" turn {gap.worst_turn} is the farthest",
    )


@lru_cache(maxsize=2)
def _weights(name: str, dtype: Literal["float32", "bfloat16"]) -> OpenedWeights:
    """Cached, since many runs name the same policy."""
    return open_weights(name, dtype=dtype)


def _opened(name: str, run: Trajectory, dtype: Literal["float32", "bfloat16"]) -> OpenedWeights:
    """The weights that sampled the run. Raises NotAtHand."""
    way_out = "name where they lie with --model"
    try:
        opened = _weights(name, dtype)
    except NanoError as problem:
        raise NotAtHand(f"the policy of run {run.id} is not at hand ({problem}); {way_out}") from problem
    last = run.turns[-1].completion
    if opened.loaded.id != last.policy_id:
        raise NotAtHand(
            f"the policy of run {run.id} is not at hand: {name} holds the weights {opened.loaded.id[:19]},"
            f" and {last.policy_id[:19]} sampled it; {way_out}"
        )
    if opened.version != last.policy_version:
        raise NotAtHand(
            f"the policy of run {run.id} is not at hand: it was sampled {last.policy_version} optimizer"
            f" steps in, and {name} has {opened.version}; the weights of a training's middle are not kept"
        )
    return opened
