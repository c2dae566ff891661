"""One step of the policy: groups with a signal -> credit -> samples -> minibatches -> guarded updates.

A step passes `updates_per_step` times over its rollouts, each time in `minibatches` parts of whole groups,
and each part is one update of the weights with denominators of its own. The trainer's log-probs are taken
once, before the first update, so that the ratio of every later one is real; on the first it is exactly 1.

    L = L_RL + beta * L_KL + lambda_sft * L_SFT

L_RL and L_KL are means over the trained tokens of the rollouts, L_SFT over those of the demonstrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor, nn

from nano_rl.aggregation import token_weights
from nano_rl.batch import Batch, make_batches
from nano_rl.config import TrainConfig
from nano_rl.credit import group_credit, has_signal, turn_rewards
from nano_rl.critic import Critic, Lesson, explained_variance
from nano_rl.gae import reward_chain
from nano_rl.group import Group
from nano_rl.guards import check_step
from nano_rl.imitation import Demonstrations, own_successes
from nano_rl.learner import Guard, Learner
from nano_rl.logprob import TokenScores, can_share, loss_and_scores, token_logprobs
from nano_rl.loss import policy_loss, sft_loss
from nano_rl.reference import Reference
from nano_rl.rewards import Reward
from nano_rl.sample import TrainSample, group_samples, recent_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one update learns from."""

    batches: list[Batch]
    """rollouts, for the policy's objective"""
    imitated: list[Batch]
    """demonstrations, for maximum likelihood"""
    lessons: list[Lesson]
    """rollouts, for the critic; empty without one"""

    def with_old(self, model: nn.Module) -> Minibatch:
        """The same with the log-probs of the weights as they are."""
        with torch.no_grad():
            return replace(self, batches=[b.with_old(token_logprobs(model, b)) for b in self.batches])


def learn(
    learner: Learner,
    reference: Reference | None,
    groups: Sequence[Group],
    values: dict[str, float],
    config: TrainConfig,
    version: int,
    history: Sequence[dict[str, float]],
    reward: Reward | None,
    critic: Critic | None = None,
    demonstrations: Demonstrations | None = None,
) -> dict[str, float]:
    """All updates of one step, and its metrics; none at all where there is nothing to learn.

    Added to what the objective reports: `updates`, `stale`, `stale_dropped`, `tree_fallback`
    (1 where the model runs on independent rows), `skipped`; with a critic
    `value_*`; and with a mixed loss `loss_policy`, `loss_kl`, `loss_sft` as they are weighted, each one's
    `share_*` of the sum of their magnitudes, and `sft_tokens`.
    """
    objective = config.objective
    live = [group for group in groups if has_signal(group, objective, reward)]
    if config.shuffle_rewards:
        # imitation is a control too: what it takes for successes must be shuffled with the rest
        groups = live = shuffled(live, Random(f"shuffle {config.seed} {learner.step}"))
    imitated = _imitated(groups, config, learner.step, demonstrations)
    if not live and not imitated:
        check_step(values, config.guards, earlier=history)
        learner.step += 1
        return {"skipped": 1.0}
    if critic is None:
        lessons_of: list[list[Lesson]] = [[] for _ in live]
        samples_of = [group_samples(g, advantages_G=group_credit(g, objective, reward)) for g in live]
    else:
        lessons_of = _lessons(critic, live, config)
        samples_of = [[lesson.sample for lesson in lessons] for lessons in lessons_of]
        # a critic compares with what it expected: groups whose rewards are equal do teach
        values = {**values, "frac_zero_std": 0.0}
    samples_of, lessons_of, dropped = _recent(samples_of, lessons_of, version, objective.max_staleness)
    samples = [sample for of_group in samples_of for sample in of_group]
    if not samples and not imitated:
        check_step(values, config.guards, earlier=history)
        learner.step += 1
        return {"skipped": 1.0, "stale_dropped": float(dropped)}
    trees = can_share(learner.model)
    minibatches = _minibatches(samples_of, lessons_of, imitated, config, reference, learner.step, trees=trees)
    stale = _stale(samples, version)

    def guard(update: int, metrics: dict[str, float]) -> None:
        judged = {**values, **metrics, "stale": stale, "update": float(update)}
        check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

    order = _order(len(minibatches), config, learner.step)
    later = [m.with_old(learner.model) for m in minibatches] if len(order) > 1 else []
    rows = []
    for update, index in enumerate(order):
        # the weights of the first update are those that the old log-probs would be taken from
        minibatch = minibatches[index] if update == 0 else later[index]
        ends_step = update == len(order) - 1
        rows.append(_update(learner, minibatch, config, lambda m, u=update: guard(u, m), ends_step))
        if critic is not None and minibatch.lessons:
            rows[-1] |= critic.update(minibatch.lessons, ends_step=ends_step)
    learned = _over_updates(rows, passes=config.updates_per_step)
    if critic is not None:
        learned |= explained_variance([lesson for lessons in lessons_of for lesson in lessons])
    counts = {"stale": stale, "stale_dropped": float(dropped), "tree_fallback": float(not trees)}
    return {**learned, **counts, "skipped": 0.0}


def _update(
    learner: Learner, minibatch: Minibatch, config: TrainConfig, guard: Guard, ends_step: bool
) -> dict[str, float]:
    imitated = {id(batch) for batch in minibatch.imitated}
    objective = config.objective
    sums = {"loss_sft": 0.0, "sft_tokens": 0.0}

    def reinforce(scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return policy_loss(scores.logprobs_BT, batch, objective, entropy_BT=scores.entropy_BT)

    def imitate(scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        nll, metrics = sft_loss(scores.logprobs_BT, batch)
        return config.lambda_sft * nll, metrics

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        if id(batch) in imitated:
            weighted, metrics = loss_and_scores(model, batch, imitate, separable=True, entropy=False)
            sums["sft_tokens"] += metrics["tokens"]
            sums["loss_sft"] += config.lambda_sft * metrics["loss"]
            return weighted, {"loss": config.lambda_sft * metrics["loss"]}
        return loss_and_scores(
            model,
            batch,
            reinforce,
            separable=objective.separable,
            entropy_gradient=objective.entropy_bonus > 0,
        )

    batches = [*minibatch.batches, *minibatch.imitated]
    metrics = learner.update(batches, loss, guard, ends_step=ends_step)
    if config.lambda_sft == 0:
        return metrics
    kl = objective.beta * metrics.get("kl_reference", 0.0) if objective.kl_in == "loss" else 0.0
    parts = {"policy": metrics["loss"] - sums["loss_sft"] - kl, "kl": kl, "sft": sums["loss_sft"]}
    whole = sum(map(abs, parts.values()))
    shares = {f"share_{name}": abs(part) / whole if whole else 0.0 for name, part in parts.items()}
    losses = {f"loss_{name}": part for name, part in parts.items()}
    return {**metrics, **losses, **shares, "sft_tokens": sums["sft_tokens"]}


def _minibatches(
    samples_of: Sequence[Sequence[TrainSample]],
    lessons_of: Sequence[Sequence[Lesson]],
    imitated: Sequence[TrainSample],
    config: TrainConfig,
    reference: Reference | None,
    step: int,
    *,
    trees: bool,
) -> list[Minibatch]:
    """Whole groups dealt out in a seeded order; as many parts as there are groups where those are fewer."""
    objective = config.objective
    groups = list(range(len(samples_of)))
    count = max(1, min(config.minibatches, len(groups)))
    if count > 1:
        Random(f"minibatches {config.seed} {step}").shuffle(groups)
    minibatches = []
    for part in range(count):
        chosen = groups[part::count]
        samples = [s for g in chosen for s in samples_of[g]]
        weights = token_weights(samples, objective.aggregation, constant_length=objective.constant_length)
        batches = make_batches(samples, max_tokens=config.max_tokens, weights=weights, trees=trees)
        minibatches.append(
            Minibatch(
                batches=batches if reference is None else reference.score(batches),
                imitated=make_batches(imitated[part::count], max_tokens=config.max_tokens, trees=trees),
                lessons=[lesson for g in chosen for lesson in lessons_of[g]],
            )
        )
    return minibatches


def _order(count: int, config: TrainConfig, step: int) -> list[int]:
    """The minibatch of each update: every pass sees all of them, each later pass in a seeded order."""
    order = list(range(count))
    for later in range(1, config.updates_per_step):
        again = list(range(count))
        Random(f"pass {config.seed} {step} {later}").shuffle(again)
        order += again
    return order


def _imitated(
    groups: Sequence[Group], config: TrainConfig, step: int, demonstrations: Demonstrations | None
) -> list[TrainSample]:
    if config.lambda_sft == 0:
        return []
    return own_successes(groups) if demonstrations is None else demonstrations.draw(step)


def _lessons(critic: Critic, groups: Sequence[Group], config: TrainConfig) -> list[list[Lesson]]:
    """[groups] the rows of each with advantages by GAE; rollouts without a reward leave."""
    chains = [
        [
            reward_chain(run, earned)
            for run, earned in zip(group.trajectories, turn_rewards(group, config.objective), strict=True)
            if earned is not None
        ]
        for group in groups
    ]
    lessons = iter(critic.lessons([chain for of_group in chains for chain in of_group]))
    return [[lesson for _ in of_group for lesson in next(lessons)] for of_group in chains]


def _recent(
    samples_of: list[list[TrainSample]], lessons_of: list[list[Lesson]], version: int, limit: int | None
) -> tuple[list[list[TrainSample]], list[list[Lesson]], int]:
    """Groups that have something left to train after tokens that are too old have left, and their number."""
    dropped = 0
    kept: list[tuple[list[TrainSample], list[Lesson]]] = []
    for samples, lessons in zip(samples_of, lessons_of, strict=True):
        recent, gone = recent_samples(samples, version, limit)
        dropped += gone
        taught = [
            replace(lesson, sample=sample)
            for lesson in lessons
            for sample in recent_samples([lesson.sample], version, limit)[0]
        ]
        if recent:
            kept.append((recent, taught))
    return [samples for samples, _ in kept], [lessons for _, lessons in kept], dropped


def _over_updates(rows: Sequence[dict[str, float]], *, passes: int) -> dict[str, float]:
    """The metrics of a step: means over its updates, maxima of maxima, and its tokens counted once."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name in ("tokens", "sft_tokens"):
            merged[name] = sum(values) / passes
        else:
            merged[name] = sum(values) / len(values)
    return {**merged, "updates": float(len(rows))}


def _stale(samples: Sequence[TrainSample], version: int) -> float:
    """Share of the trained tokens that an older policy sampled."""
    tokens = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    return sum(v != version for v in tokens) / max(1, len(tokens))


def shuffled(groups: Sequence[Group], random: Random) -> list[Group]:
    """The negative control: the same verdicts, each on another rollout."""
    # what each turn earned is another rollout's too, which may have had another number of turns
    verdicts = [
        t.verdict and t.verdict.model_copy(update={"turn_rewards": None})
        for g in groups
        for t in g.trajectories
    ]
    random.shuffle(verdicts)
    return [
        replace(
            g, trajectories=tuple(t.model_copy(update={"verdict": verdicts.pop()}) for t in g.trajectories)
        )
        for g in groups
    ]
