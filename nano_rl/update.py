"""One update of the policy: the groups that have a signal -> samples -> batches -> a guarded step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from torch import Tensor, nn

from nano_rl.aggregation import token_weights
from nano_rl.batch import Batch, make_batches
from nano_rl.config import TrainConfig
from nano_rl.credit import group_credit, has_signal
from nano_rl.group import Group
from nano_rl.guards import check_step
from nano_rl.learner import Learner
from nano_rl.logprob import TokenScores, can_share, loss_and_scores
from nano_rl.loss import policy_loss
from nano_rl.reference import Reference
from nano_rl.rewards import Reward
from nano_rl.sample import TrainSample, group_samples


def learn(
    learner: Learner,
    reference: Reference | None,
    groups: Sequence[Group],
    values: dict[str, float],
    config: TrainConfig,
    version: int,
    history: Sequence[dict[str, float]],
    reward: Reward | None,
) -> dict[str, float]:
    """One update on the groups that have a signal; none at all where no group has one."""
    objective = config.objective
    live = [group for group in groups if has_signal(group, objective, reward)]
    if not live:
        check_step(values, config.guards, earlier=history)
        learner.step += 1
        return {"skipped": 1.0}
    if config.shuffle_rewards:
        live = shuffled(live, Random(f"shuffle {config.seed} {learner.step}"))
    samples = [s for g in live for s in group_samples(g, advantages_G=group_credit(g, objective, reward))]
    weights = token_weights(samples, objective.aggregation, constant_length=objective.constant_length)
    trees = can_share(learner.model)
    batches = make_batches(samples, max_tokens=config.max_tokens, weights=weights, trees=trees)
    if reference is not None:
        batches = reference.score(batches)
    stale = _stale(samples, version)

    def of_scores(scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return policy_loss(scores.logprobs_BT, batch, objective, entropy_BT=scores.entropy_BT)

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return loss_and_scores(model, batch, of_scores, separable=objective.separable)

    def guard(metrics: dict[str, float]) -> None:
        judged = {**values, **metrics, "stale": stale}
        check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

    updated = learner.update(batches, loss, guard)
    return {**updated, "stale": stale, "skipped": 0.0, "tree_fallback": float(not trees)}


def _stale(samples: Sequence[TrainSample], version: int) -> float:
    """Share of the trained tokens that an older policy sampled."""
    tokens = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    return sum(v != version for v in tokens) / max(1, len(tokens))


def shuffled(groups: Sequence[Group], random: Random) -> list[Group]:
    """The negative control: the same verdicts, each on another rollout."""
    verdicts = [t.verdict for g in groups for t in g.trajectories]
    random.shuffle(verdicts)
    return [
        replace(
            g, trajectories=tuple(t.model_copy(update={"verdict": verdicts.pop()}) for t in g.trajectories)
        )
        for g in groups
    ]
