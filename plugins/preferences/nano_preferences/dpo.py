"""Direct preference optimisation (DPO), as a training of its own and as a term beside the policy loss.

    h = (log p(chosen) - log p0(chosen)) - (log p(rejected) - log p0(rejected))
    sigmoid   -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)      s: label smoothing
    ipo       (h - 1 / (2 beta))^2
    loss      mean over pairs + lambda_sft * mean over chosen tokens of -log p

DPO: Rafailov et al. 2023 (arXiv 2305.18290); IPO: Azar et al. 2023 (arXiv 2310.12036); label smoothing:
Mitchell 2023; the added likelihood: Pang et al. 2024 (arXiv 2404.19733). log p is the sum over the tokens
that each side's policy wrote, or the mean with `length_normalised`. p0 is the policy at the start: its
log-probs are computed once, before the first update, so that no second model is needed. Left out: weighting
pairs by confidence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from nano_coder.models.opening import OpenedWeights
from nano_preferences.config import DpoConfig
from nano_preferences.critic import by_budget
from nano_preferences.pairs import PairRows, PreferencePair, pair_rows
from nano_rl.config import TrainConfig
from nano_rl.imitation import RunEncoder, reader_of
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.groups import Group, TrainSample
from nano_rl.learn.learner import Learner
from nano_rl.learn.logprob import token_logprobs
from nano_rl.train_fixed_rows import OnStep, step_indices, train_rows, usual_guards
from nano_shared.errors import UsageError

CHOSEN, REJECTED = "+", "-"
Scores = dict[str, float]
"""key of a side (index of the pair and + or -) -> its log-prob"""


def train_dpo(
    model: nn.Module, pairs: Sequence[PairRows], config: DpoConfig, folder: Path, on_step: OnStep
) -> int:
    """Train in place, continuing from a state saved in `folder`. Returns the total of steps done. Metrics, as
    means over the pairs of a step: `accuracy` (pairs with h > 0), `margin` (beta h), and `chosen_logprob` and
    `rejected_logprob` per side."""
    # the model holds the starting weights here; a resumed state is loaded afterwards
    reference = reference_scores(model, pairs, config)

    def do_step(learner: Learner, indices: Sequence[int]) -> dict[str, float]:
        objective = PairObjective(pairs, indices, reference, config)
        values = learner.update(pair_batches(pairs, indices, config.max_tokens), objective, usual_guards)
        seen = sum(len(row.ids) for i in indices for row in (*pairs[i].chosen, *pairs[i].rejected))
        return {**values, **objective.metrics(), "seen": float(seen)}

    rows = [(*pair.chosen, *pair.rejected) for pair in pairs]
    return train_rows(model, rows, config, folder, on_step, do_step)


def preference_loss(margin_P: Tensor, config: DpoConfig) -> Tensor:
    """[P] loss of each pair from its h."""
    if config.loss == "ipo":
        return (margin_P - 1 / (2 * config.beta)).square()
    right_P, wrong_P = logsigmoid(config.beta * margin_P), logsigmoid(-config.beta * margin_P)
    return -(1 - config.label_smoothing) * right_P - config.label_smoothing * wrong_P


@torch.no_grad()
def reference_scores(model: nn.Module, pairs: Sequence[PairRows], config: DpoConfig) -> Scores:
    """The log-probs of all sides under the current weights."""
    scores: Scores = {}
    for batch in pair_batches(pairs, range(len(pairs)), config.max_tokens):
        logprobs_BT = token_logprobs(model, batch)
        sides = side_scores(logprobs_BT, batch.to(logprobs_BT.device), mean=config.length_normalised)
        scores |= {side: score.item() for side, score in sides.items()}
    return scores


def side_scores(logprobs_BT: Tensor, batch: Batch, *, mean: bool) -> dict[str, Tensor]:
    """Key of a side -> the sum, or mean, of the log-probs of its trained tokens over all its rows."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, side in enumerate(batch.run_ids):
        rows[side].append(row)
    sum_B, count_B = logprobs_BT.sum(dim=1), batch.mask_BT.sum(dim=1)
    return {side: sum_B[of].sum() / (count_B[of].sum() if mean else 1) for side, of in rows.items()}


def pair_batches(pairs: Sequence[PairRows], indices: Sequence[int], max_tokens: int) -> list[Batch]:
    """Micro-batches with both sides of each of their pairs. Row ids are the position in `indices` and the
    side: a step across two epochs may have a pair twice."""
    lengths = [max(len(row.ids) for row in _all(pairs[i])) * len(_all(pairs[i])) for i in indices]
    batches = []
    for part in by_budget(lengths, max_tokens):
        samples = [row for place in part for row in _named(place, pairs[indices[place]])]
        # a budget that all rows fit into, so that no pair is split
        fits = len(samples) * max(len(s.ids) for s in samples)
        batches += make_batches(samples, max_tokens=fits, trees=False)
    return batches


class PairObjective:
    """The loss of the pairs of one step, and sums for its metrics."""

    def __init__(
        self, pairs: Sequence[PairRows], indices: Sequence[int], reference: Scores, config: DpoConfig
    ) -> None:
        self._start = [reference[f"{i}{CHOSEN}"] - reference[f"{i}{REJECTED}"] for i in indices]
        self._config = config
        self.count = len(indices)
        self._chosen_tokens = sum(row.num_action_tokens for i in indices for row in pairs[i].chosen)
        self._sums: Counter[str] = Counter()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        config = self._config
        logprobs_BT = token_logprobs(model, batch)
        scores = side_scores(logprobs_BT, batch, mean=config.length_normalised)
        numbers = [side.removesuffix(CHOSEN) for side in scores if side.endswith(CHOSEN)]
        chosen_P = torch.stack([scores[n + CHOSEN] for n in numbers])
        rejected_P = torch.stack([scores[n + REJECTED] for n in numbers])
        margin_P = chosen_P - rejected_P - chosen_P.new_tensor([self._start[int(n)] for n in numbers])
        loss = preference_loss(margin_P, config).sum() / self.count
        self._count("loss_preference", loss * self.count)
        if config.lambda_sft > 0:
            imitated = torch.tensor([side.endswith(CHOSEN) for side in batch.run_ids])
            nll = -logprobs_BT[imitated.to(logprobs_BT.device)].sum() / self._chosen_tokens
            self._count("loss_sft", config.lambda_sft * nll * self.count)
            loss = loss + config.lambda_sft * nll
        self._count("accuracy", (margin_P > 0).sum())
        self._count("margin", config.beta * margin_P.sum())
        self._count("chosen_logprob", chosen_P.sum())
        self._count("rejected_logprob", rejected_P.sum())
        return loss, {"loss": loss.item(), "tokens": float(batch.mask_BT.sum())}

    def metrics(self) -> dict[str, float]:
        """Means over the pairs of the step."""
        return {name: value / self.count for name, value in self._sums.items()}

    def _count(self, name: str, value: Tensor) -> None:
        self._sums[name] += value.item()  # type: ignore[assignment]


def _all(pair: PairRows) -> tuple[TrainSample, ...]:
    return (*pair.chosen, *pair.rejected)


def _named(place: int, pair: PairRows) -> list[TrainSample]:
    sides = ((pair.chosen, CHOSEN), (pair.rejected, REJECTED))
    return [replace(row, run_id=f"{place}{sign}") for rows, sign in sides for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceTerm:
    """`LossTerm`: the mean DPO loss of the pairs of a step."""

    weight: float
    pairs: tuple[PairRows, ...]
    reference: Scores
    """log-probs of both sides at the start of the training"""
    settings: DpoConfig
    batch: int
    """pairs of one step"""
    name: str = "preference"

    def draw(self, step: int, groups: Sequence[Group]) -> list[int]:
        """Indices of the pairs of a step: every pair once before any is repeated."""
        size = len(self.pairs)
        return step_indices(step, size=size, batch=min(self.batch, size), seed=self.settings.seed)

    def part(self, drawn: Sequence[int], index: int, count: int, *, trees: bool) -> PreferencePart:
        places = drawn[index::count]
        return PreferencePart(
            batches=pair_batches(self.pairs, places, self.settings.max_tokens) if places else [],
            pairs=PairObjective(self.pairs, places, self.reference, self.settings) if places else None,
        )

    @property
    def run_ids(self) -> list[str]:
        return sorted({run for pair in self.pairs for run in pair.run_ids})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePart:
    """`TermPart`: the pairs of one minibatch."""

    batches: list[Batch]
    """both sides of each pair"""
    pairs: PairObjective | None
    """None if the minibatch has no pairs"""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        assert self.pairs is not None
        return self.pairs(model, batch)

    def metrics(self) -> dict[str, float]:
        """`preference_pairs`, `preference_accuracy` (share of pairs with h > 0) and `preference_margin`."""
        if self.pairs is None:
            return {}
        seen = self.pairs.metrics()
        named = {f"preference_{name}": seen[name] for name in ("accuracy", "margin")}
        return {"preference_pairs": float(self.pairs.count), **named}


def preference_term(
    model: nn.Module, opened: OpenedWeights, pairs: Sequence[PreferencePair], config: TrainConfig
) -> PreferenceTerm | None:
    """The loss term of `logs.lambda_preference`; None if it is 0 or there are no pairs. `model` must hold the
    starting weights of the training, also when it is resumed."""
    if config.logs.lambda_preference == 0 or not pairs:
        return None
    reader = reader_of(opened)
    rows = tuple(row for pair in pairs for row in _rows(pair, reader))
    if not rows:
        return None
    settings = DpoConfig(seed=config.seed, max_tokens=config.max_tokens)
    return PreferenceTerm(
        weight=config.logs.lambda_preference, pairs=rows, reference=reference_scores(model, rows, settings),
        settings=settings, batch=config.prompts_per_step,
    )  # fmt: skip


def _rows(pair: PreferencePair, reader: RunEncoder) -> list[PairRows]:
    """A pair as rows: this policy's logged tokens, else its texts; empty beyond the context."""
    try:
        return pair_rows([pair], reader)
    except UsageError:
        if pair.exact is None:
            raise
        return pair_rows([pair.model_copy(update={"exact": None})], reader)
