"""The samples of one step: token rows with advantages, and the filters that drop stale tokens and runs.

Logged runs come from older policies. Their tokens get importance weights

    w = p(token) / behaviour(token)        ess = (sum w)^2 / (n sum w^2)        over n tokens

The effective sample size (ESS) is the share of the tokens that carries the estimate (Kish 1965). Runs that
the policy has moved away from have weights far from 1, a few of which outweigh all others. The runs with the
largest drift, the mean |log w| over their tokens, are dropped until the ESS of the remaining tokens reaches
the bound. Runs above the bound on drift are dropped in any case: where the policy no longer produces what the
log holds, most weights are near 0 and alike, and the ESS does not show it. The weights that remain are
truncated token by token (`objectives/loss.py`). Dropping runs by drift biases the gradient toward what the
policy still does; the metrics say how much was dropped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nano_rl.learn.advantage import Credit, group_advantages, turn_rewards
from nano_rl.learn.config import Baseline, ObjectiveConfig, Std
from nano_rl.learn.gae import reward_chain
from nano_rl.learn.model.critic import Critic, CriticRow
from nano_rl.learn.model.logprob import token_logprobs
from nano_rl.learn.objectives.loss import clamped_exp
from nano_rl.learn.rows.batch import make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample, recent_samples, to_samples


def cap_versions(samples: Sequence[TrainSample], policy_version: Mapping[str, int]) -> list[TrainSample]:
    """The samples with token versions of at most the policy version of their run, where that is given.

    `policy_version` maps run ids to versions on this policy's lineage (`logs/lineage.py`); the turns of a
    run from another training may name larger ones.
    """
    return [
        replace(s, versions=tuple(min(v, policy_version[s.run_id]) for v in s.versions))
        if s.run_id in policy_version
        else s
        for s in samples
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSelection:
    """The logged runs that are dropped under the bounds on ESS and drift."""

    dropped: frozenset[str]
    """run ids"""
    ess_before: float
    """of the tokens of all logged runs"""
    drift: float
    """mean |log weight| over the logged runs, nats per token"""
    ess: float
    """of the remaining logged tokens; 1 if none remain"""

    @property
    def metrics(self) -> dict[str, float]:
        """`ess_logged` (all logged tokens), `ess_kept` (remaining ones), `weight_dropped` (number of dropped
        runs) and `drift_logged`."""
        return {
            "ess_logged": self.ess_before,
            "ess_kept": self.ess,
            "weight_dropped": float(len(self.dropped)),
            "drift_logged": self.drift,
        }


def score_and_select(
    model: nn.Module,
    samples: Sequence[TrainSample],
    logged: Collection[str],
    bound: float,
    *,
    drift: float | None = None,
    max_tokens: int,
    trees: bool,
) -> DriftSelection | None:
    """Score the rows of logged runs with the current weights and apply `select_by_drift`; None without
    any."""
    rows = [s for s in samples if s.run_id in logged and s.num_action_tokens]
    if not rows:
        return None
    mismatch_of: dict[str, list[Tensor]] = defaultdict(list)
    named = [replace(row, key=str(place)) for place, row in enumerate(rows)]
    with torch.no_grad():
        for batch in make_batches(named, max_tokens=max_tokens, trees=trees):
            logprobs_BT = token_logprobs(model, batch).to(batch.ids_BT.device)
            mismatch_BT = (logprobs_BT - batch.behaviour_logprobs_BT).double()
            for place, values_T, mask_T in zip(batch.keys, mismatch_BT, batch.mask_BT, strict=True):
                mismatch_of[rows[int(place)].run_id].append(values_T[mask_T].cpu())
    return select_by_drift({run: torch.cat(parts) for run, parts in mismatch_of.items()}, bound, drift)


def select_by_drift(
    mismatch_of: Mapping[str, Tensor], bound: float, drift: float | None = None
) -> DriftSelection:
    """Keep as many runs as possible, in ascending order of drift, with an ESS of at least `bound` together
    and a drift of at most `drift` each.

    `mismatch_of` maps each run to [N] policy - behaviour log-probs of its tokens, nats.
    """
    drifts = {run: float(values_N.abs().mean()) for run, values_N in mismatch_of.items()}
    ascending = sorted(drifts, key=lambda run: (drifts[run], run))
    allowed = sum(drift is None or value <= drift for value in drifts.values())
    weights = [clamped_exp(mismatch_of[run].double()) for run in ascending]
    count = torch.tensor([len(w) for w in weights], dtype=torch.float64).cumsum(0)
    total = torch.stack([w.sum() for w in weights]).cumsum(0)
    squared = torch.stack([w.square().sum() for w in weights]).cumsum(0)
    ess = (total.square() / (count * squared)).tolist()
    kept = max((place for place, value in enumerate(ess[:allowed], start=1) if value >= bound), default=0)
    return DriftSelection(
        dropped=frozenset(ascending[kept:]),
        ess_before=ess[-1],
        drift=sum(drifts.values()) / len(drifts),
        ess=ess[kept - 1] if kept else 1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The samples of a step by group, and with a critic the same rows with its returns and values."""

    samples_of: list[list[TrainSample]]
    """[groups] the rows of each; no group is empty"""
    critic_rows_of: list[list[CriticRow]]
    """[groups] the critic's rows of each; empty without a critic"""

    @classmethod
    def compared(cls, groups: Sequence[Group], credits: Sequence[Credit]) -> StepRows:
        """Rows with the given credit ([groups][G]) of each rollout."""
        rows = [group_samples(g, advantages_G=c) for g, c in zip(groups, credits, strict=True)]
        return cls(samples_of=rows, critic_rows_of=[[] for _ in groups])

    @classmethod
    def valued(cls, groups: Sequence[Group], objective: ObjectiveConfig, critic: Critic) -> StepRows:
        """Rows with advantages by GAE under the critic's values; rollouts without a reward are left out."""
        chains = [
            [
                reward_chain(run, rewards)
                for run, rewards in zip(group.trajectories, turn_rewards(group, objective), strict=True)
                if rewards is not None
            ]
            for group in groups
        ]
        rows = iter(critic.rows([chain for of_group in chains for chain in of_group]))
        rows_of = [[row for _ in of_group for row in next(rows)] for of_group in chains]
        return cls(
            samples_of=[[row.sample for row in of_group] for of_group in rows_of], critic_rows_of=rows_of
        )

    @property
    def samples(self) -> list[TrainSample]:
        return [sample for of_group in self.samples_of for sample in of_group]

    @property
    def critic_rows(self) -> list[CriticRow]:
        return [row for of_group in self.critic_rows_of for row in of_group]

    def cap_versions(self, policy_version: Mapping[str, int]) -> StepRows:
        """The rows with `cap_versions` applied to their samples."""
        return StepRows(
            samples_of=[cap_versions(samples, policy_version) for samples in self.samples_of],
            critic_rows_of=[
                [replace(row, sample=cap_versions([row.sample], policy_version)[0]) for row in of_group]
                for of_group in self.critic_rows_of
            ],
        )

    def drop_stale(self, version: int, max_staleness: int | None) -> tuple[StepRows, int]:
        """Drop stale tokens. Returns the remaining groups and the number of dropped tokens."""
        dropped = 0
        kept: list[tuple[list[TrainSample], list[CriticRow]]] = []
        for samples, critic_rows in zip(self.samples_of, self.critic_rows_of, strict=True):
            recent, stale = recent_samples(samples, version, max_staleness)
            dropped += stale
            recent_rows = [
                replace(row, sample=sample)
                for row in critic_rows
                for sample in recent_samples([row.sample], version, max_staleness)[0]
            ]
            if recent:
                kept.append((recent, recent_rows))
        return _of(kept), dropped

    def drop_runs(self, run_ids: Container[str]) -> StepRows:
        """Drop runs. Returns the groups that still have rows."""
        return _of(
            (rows, [row for row in critic_rows if row.sample.run_id not in run_ids])
            for samples, critic_rows in zip(self.samples_of, self.critic_rows_of, strict=True)
            if (rows := [sample for sample in samples if sample.run_id not in run_ids])
        )


def _of(kept: Iterable[tuple[list[TrainSample], list[CriticRow]]]) -> StepRows:
    pairs = list(kept)
    return StepRows(samples_of=[rows for rows, _ in pairs], critic_rows_of=[rows for _, rows in pairs])


def group_samples(
    group: Group,
    *,
    baseline: Baseline = "mean",
    std: Std = "none",
    eps: float = 1e-4,
    advantages_G: Sequence[float | Sequence[float] | None] | None = None,
) -> list[TrainSample]:
    """The samples of a group. A rollout without a reward is left out of the loss and of the baseline.

    `advantages_G` are precomputed advantages (`group_credit`): of each rollout one number, one for each
    turn, or None to leave the rollout out of the loss.
    """
    rewards_G = group.rewards_G
    if advantages_G is None:
        advantages_G = group_advantages(rewards_G, baseline=baseline, std=std, eps=eps)
    members = zip(group.trajectories, rewards_G, advantages_G, strict=True)
    # a run whose prompt fills the context has no turn: it counts in the baseline and has nothing to train
    trained = ((t, a) for t, reward, a in members if not math.isnan(reward) and t.own_turns)
    return [s for t, a in trained if a is not None for s in to_samples(t, a)]
