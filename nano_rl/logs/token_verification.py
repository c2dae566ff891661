"""The second look at a run that its columns admit: its tokens against the texts and the template, and its
log-probs against the weights where they are the ones that sampled it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.verify.logprobs import Scored, gap_of, rescored
from nano_coder.verify.refusal import Refusal
from nano_coder.verify.tokens import TokenCheck
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    refusal: Refusal | None
    tokens: tuple[Scored, ...] = ()
    """its sampled tokens under the policy at hand; empty where they were not scored"""


class SecondLook:
    """For one policy and one log."""

    def __init__(self, opened: OpenedWeights, store: LogStore) -> None:
        policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        self.template_hash = policy.template_hash
        self._check = TokenCheck(template=policy.template, eos_ids=opened.loaded.eos_ids, blobs=store.blobs)
        self._engine: Any = policy.engine
        self._sampler = (opened.loaded.id, opened.version)

    def refusal(self, run: Trajectory) -> Refusal | None:
        """What is wrong with a run. Only a run of this very policy costs a forward pass."""
        return self.see(run, score=self._sampled(run)).refusal

    def see(self, run: Trajectory, *, score: bool) -> Seen:
        """What is wrong with a run, and with `score` its tokens under this policy."""
        refusal = self._check.refusal(run)
        if refusal is not None or not score:
            return Seen(refusal=refusal)
        tokens = tuple(rescored(run, self._engine))
        if self._sampled(run) and not gap_of(tokens).close:
            refusal = Refusal.OTHER_LOGPROBS
        return Seen(refusal=refusal, tokens=tokens)

    def _sampled(self, run: Trajectory) -> bool:
        """Whether these weights are the ones that the whole run names."""
        turns = ((turn.completion.policy_id, turn.completion.policy_version) for turn in run.turns)
        return all(sampler == self._sampler for sampler in turns)
