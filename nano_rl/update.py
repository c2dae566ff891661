"""One step of the policy: groups with a signal -> credit -> samples -> minibatches -> guarded updates.

A step passes `updates_per_step` times over its rollouts, each time in `minibatches` parts of whole groups,
and each part is one update of the weights with denominators of its own. The trainer's log-probs are taken
once, before the first update, so that the ratio of every later one is real; on the first it is exactly 1.

What stands beside the policy's own loss is in `mixture.py`. Logged runs bring rows of older policies: those
too old, or too far for the bound on the effective sample size, leave first (`staleness.py`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from random import Random

from torch import nn

from nano_rl.aggregation import token_weights
from nano_rl.batch import make_batches
from nano_rl.config import TrainConfig
from nano_rl.credit.baselines import Baselines
from nano_rl.credit.gae import reward_chain
from nano_rl.credit.turns import has_signal, turn_rewards
from nano_rl.group import Group
from nano_rl.guards import check_step
from nano_rl.imitation.rows import Demonstrations, own_successes
from nano_rl.logs.staleness import Kept, aged, within_ess
from nano_rl.mixture import Minibatch, update_mixture
from nano_rl.model.critic import Critic, Lesson, explained_variance
from nano_rl.model.learner import Learner
from nano_rl.model.logprob import can_share
from nano_rl.model.reference import Reference
from nano_rl.preferences.preferred import Preferred
from nano_rl.rewards import Reward
from nano_rl.sample import TrainSample, group_samples, recent_samples


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
    preferred: Preferred | None = None,
    logged: Mapping[str, int] | None = None,
    baselines: Baselines | None = None,
) -> dict[str, float]:
    """All updates of one step, and its metrics; none at all where there is nothing to learn.

    `logged` are the runs of the step that come from a log, with the version that sampled each; `baselines`
    is what they are compared with over time. Added to what the objective reports: `updates`, `stale`,
    `stale_dropped` (tokens), `tree_fallback` (1 where the model runs on independent rows), `skipped`; of
    logged runs `ess_logged`, `ess_kept`, `weight_dropped`, and `all_dropped` where nothing was near enough;
    with a critic `value_*`; with a mixed loss what `update_mixture` says.
    """
    objective, logged = config.objective, logged or {}
    live = [group for group in groups if has_signal(group, objective, reward)]
    if config.shuffle_rewards:
        # imitation is a control too: what it takes for successes must be shuffled with the rest
        groups = live = shuffled(live, Random(f"shuffle {config.seed} {learner.step}"))
    imitated = _imitated(groups, config, learner.step, demonstrations)
    compared = preferred.draw(learner.step) if preferred else []
    beside = bool(imitated or compared)
    if not live and not beside:
        check_step(values, config.guards, earlier=history)
        learner.step += 1
        return {"skipped": 1.0}
    if critic is None:
        credits = (baselines or Baselines()).credit(live, objective, reward)
        lessons_of: list[list[Lesson]] = [[] for _ in live]
        samples_of = [group_samples(g, advantages_G=c) for g, c in zip(live, credits, strict=True)]
    else:
        lessons_of = _lessons(critic, live, config)
        samples_of = [[lesson.sample for lesson in lessons] for lessons in lessons_of]
    if critic is not None or objective.over_time:
        # what is expected comes from elsewhere: groups whose rewards are equal do teach
        values = {**values, "frac_zero_std": 0.0}
    if logged:
        samples_of = [aged(samples, logged) for samples in samples_of]
        lessons_of = [_aged_lessons(lessons, logged) for lessons in lessons_of]
    samples_of, lessons_of, dropped = _recent(samples_of, lessons_of, version, objective.max_staleness)
    trees = can_share(learner.model)
    near = _near(learner.model, samples_of, logged, version, config, trees=trees)
    if near is not None:
        samples_of, lessons_of = _without(samples_of, lessons_of, near.gone)
    counts = {"stale_dropped": float(dropped), **(near.metrics if near else {})}
    samples = [sample for of_group in samples_of for sample in of_group]
    if not samples and not beside:
        counts["all_dropped"] = 1.0
        check_step({**values, **counts}, config.guards, earlier=history)
        learner.step += 1
        return {"skipped": 1.0, **counts}
    minibatches = _minibatches(
        samples_of, lessons_of, imitated, compared, preferred, config, reference, learner.step, trees=trees
    )
    stale = _stale(samples, version)

    def guard(update: int, metrics: dict[str, float]) -> None:
        judged = {**values, **metrics, "stale": stale, "update": float(update)}
        if not samples:
            judged.pop("tokens", None)  # what stands beside counts its own
        check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

    order = _order(len(minibatches), config, learner.step)
    later = [m.with_old(learner.model) for m in minibatches] if len(order) > 1 else []
    rows = []
    for update, index in enumerate(order):
        # the weights of the first update are those that the old log-probs would be taken from
        minibatch = minibatches[index] if update == 0 else later[index]
        ends_step = update == len(order) - 1
        rows.append(
            update_mixture(learner, minibatch, config, lambda m, u=update: guard(u, m), ends_step=ends_step)
        )
        if critic is not None and minibatch.lessons:
            rows[-1] |= critic.update(minibatch.lessons, ends_step=ends_step)
    learned = _over_updates(rows, passes=config.updates_per_step)
    if critic is not None:
        learned |= explained_variance([lesson for lessons in lessons_of for lesson in lessons])
    return {**learned, **counts, "stale": stale, "tree_fallback": float(not trees), "skipped": 0.0}


def _near(
    model: nn.Module,
    samples_of: Sequence[Sequence[TrainSample]],
    logged: Mapping[str, int],
    version: int,
    config: TrainConfig,
    *,
    trees: bool,
) -> Kept | None:
    """The logged runs within the bound on the effective sample size; None where nothing is judged."""
    old = {run for run, born in logged.items() if born != version}
    if not old or (config.logs.min_ess == 0 and config.logs.max_drift is None):
        return None
    samples = [sample for of_group in samples_of for sample in of_group]
    return within_ess(
        model,
        samples,
        old,
        config.logs.min_ess,
        drift=config.logs.max_drift,
        max_tokens=config.max_tokens,
        trees=trees,
    )


def _without(
    samples_of: Sequence[Sequence[TrainSample]], lessons_of: Sequence[Sequence[Lesson]], gone: Container[str]
) -> tuple[list[list[TrainSample]], list[list[Lesson]]]:
    """Groups that have something left to train without some runs."""
    kept = [
        (rows, [lesson for lesson in lessons if lesson.sample.run_id not in gone])
        for samples, lessons in zip(samples_of, lessons_of, strict=True)
        if (rows := [sample for sample in samples if sample.run_id not in gone])
    ]
    return [rows for rows, _ in kept], [lessons for _, lessons in kept]


def _aged_lessons(lessons: Sequence[Lesson], logged: Mapping[str, int]) -> list[Lesson]:
    rows = aged([lesson.sample for lesson in lessons], logged)
    return [replace(lesson, sample=row) for lesson, row in zip(lessons, rows, strict=True)]


def _minibatches(
    samples_of: Sequence[Sequence[TrainSample]],
    lessons_of: Sequence[Sequence[Lesson]],
    imitated: Sequence[TrainSample],
    compared: Sequence[int],
    preferred: Preferred | None,
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
        pairs = compared[part::count]
        batches = make_batches(samples, max_tokens=config.max_tokens, weights=weights, trees=trees)
        minibatches.append(
            Minibatch(
                batches=batches if reference is None else reference.score(batches),
                imitated=make_batches(imitated[part::count], max_tokens=config.max_tokens, trees=trees),
                preferred=preferred.batches(pairs) if preferred and pairs else [],
                pairs=preferred.objective(pairs) if preferred and pairs else None,
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
        elif name in ("tokens", "sft_tokens", "preference_pairs"):
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
