"""Direct preference optimisation: from pairs to the policy, without a reward model between them.

    h = (log p(chosen) - log p0(chosen)) - (log p(rejected) - log p0(rejected))
    sigmoid   -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)      s: label smoothing
    ipo       (h - 1 / (2 beta))^2
    loss      mean over pairs + lambda_sft * mean over chosen tokens of -log p

DPO: Rafailov et al. 2023 (arXiv 2305.18290); IPO: Azar et al. 2023 (arXiv 2310.12036); smoothing: Mitchell
2023; imitation beside it: Pang et al. 2024 (arXiv 2404.19733). Log-probs are sums over the tokens that each
side's policy wrote, or means of them where `length_normalised`. p0 is the policy as it starts: its log-probs
are taken once, before the first update, and no second model is kept. Left out: pairs weighted by confidence.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from nano_rl.learn.config.training import GuardConfig
from nano_rl.learn.guards import check_step
from nano_rl.learn.model.learner import Learner
from nano_rl.learn.model.logprob import token_logprobs
from nano_rl.learn.model.scalar_model import by_budget
from nano_rl.learn.offline import OnStep, run_steps, step_indices
from nano_rl.learn.rows.batch import Batch, make_batches
from nano_rl.learn.rows.sample import TrainSample
from nano_rl.preferences.config import DpoConfig
from nano_rl.preferences.pairs import PairRows

CHOSEN, REJECTED = "+", "-"
Scores = dict[str, float]
"""log-prob of each side of each pair, by the pair's number and the side's sign"""


def train_dpo(
    model: nn.Module, pairs: Sequence[PairRows], config: DpoConfig, folder: Path, on_step: OnStep
) -> int:
    """Train in place, going on from a state that lies under `folder`. Returns the steps done in all.

    Each step reports `accuracy` (pairs whose chosen side gained more than the other), `margin` (beta h), and
    `chosen_logprob`, `rejected_logprob` a side, as means over its pairs.
    """
    total = math.ceil(len(pairs) * config.epochs / config.batch)
    # a resumed training has loaded the starting weights, and loads its own only afterwards
    reference = reference_scores(model, pairs, config)
    learner = Learner(model, config.optimizer, steps=total)

    def do_step(step: int) -> dict[str, float]:
        indices = step_indices(step, size=len(pairs), batch=config.batch, seed=config.seed)
        objective = PairObjective(pairs, indices, reference, config)
        values = learner.update(
            pair_batches(pairs, indices, config.max_tokens), objective, lambda m: check_step(m, GuardConfig())
        )
        seen = sum(len(row.ids) for i in indices for row in (*pairs[i].chosen, *pairs[i].rejected))
        return {**values, **objective.metrics(), "seen": float(seen)}

    return run_steps(
        learner, do_step, end=total, folder=folder, save_every=config.save_every, on_step=on_step
    )


def preference_loss(margin_P: Tensor, config: DpoConfig) -> Tensor:
    """[P] the loss of each pair from its h."""
    if config.loss == "ipo":
        return (margin_P - 1 / (2 * config.beta)).square()
    right_P, wrong_P = logsigmoid(config.beta * margin_P), logsigmoid(-config.beta * margin_P)
    return -(1 - config.label_smoothing) * right_P - config.label_smoothing * wrong_P


@torch.no_grad()
def reference_scores(model: nn.Module, pairs: Sequence[PairRows], config: DpoConfig) -> Scores:
    """The log-probs of all sides under the weights as they are."""
    scores: Scores = {}
    for batch in pair_batches(pairs, range(len(pairs)), config.max_tokens):
        sides = side_scores(token_logprobs(model, batch), batch, mean=config.length_normalised)
        scores |= {side: score.item() for side, score in sides.items()}
    return scores


def side_scores(logprobs_BT: Tensor, batch: Batch, *, mean: bool) -> dict[str, Tensor]:
    """side -> the sum, or mean, of the log-probs of its trained tokens over all of its rows."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, side in enumerate(batch.keys):
        rows[side].append(row)
    sum_B, count_B = logprobs_BT.sum(dim=1), batch.mask_BT.sum(dim=1)
    return {side: sum_B[of].sum() / (count_B[of].sum() if mean else 1) for side, of in rows.items()}


def pair_batches(pairs: Sequence[PairRows], indices: Sequence[int], max_tokens: int) -> list[Batch]:
    """Micro-batches that hold both sides of each of their pairs. Rows are named by place in `indices` and
    side: where one epoch ends and the next begins, a step may see a pair twice."""
    lengths = [max(len(row.ids) for row in _all(pairs[i])) * len(_all(pairs[i])) for i in indices]
    batches = []
    for part in by_budget(lengths, max_tokens):
        samples = [row for place in part for row in _named(place, pairs[indices[place]])]
        # the budget was applied to pairs: as padded rows that all fit, none is torn apart
        fits = len(samples) * max(len(s.ids) for s in samples)
        batches += make_batches(samples, max_tokens=fits, trees=False)
    return batches


class PairObjective:
    """The loss of one step's pairs, and what its metrics are made of."""

    def __init__(
        self, pairs: Sequence[PairRows], indices: Sequence[int], reference: Scores, config: DpoConfig
    ) -> None:
        self._start = [reference[f"{i}{CHOSEN}"] - reference[f"{i}{REJECTED}"] for i in indices]
        self._config = config
        self._pairs = len(indices)
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
        loss = preference_loss(margin_P, config).sum() / self._pairs
        self._count("loss_preference", loss * self._pairs)
        if config.lambda_sft > 0:
            imitated = torch.tensor([side.endswith(CHOSEN) for side in batch.keys])
            nll = -logprobs_BT[imitated.to(logprobs_BT.device)].sum() / self._chosen_tokens
            self._count("loss_sft", config.lambda_sft * nll * self._pairs)
            loss = loss + config.lambda_sft * nll
        self._count("accuracy", (margin_P > 0).sum())
        self._count("margin", config.beta * margin_P.sum())
        self._count("chosen_logprob", chosen_P.sum())
        self._count("rejected_logprob", rejected_P.sum())
        return loss, {"loss": loss.item(), "tokens": float(batch.mask_BT.sum())}

    @property
    def count(self) -> int:
        """Pairs of the step."""
        return self._pairs

    def metrics(self) -> dict[str, float]:
        """Means over the pairs of the step."""
        return {name: value / self._pairs for name, value in self._sums.items()}

    def _count(self, name: str, value: Tensor) -> None:
        self._sums[name] += value.item()  # type: ignore[assignment]


def _all(pair: PairRows) -> tuple[TrainSample, ...]:
    return (*pair.chosen, *pair.rejected)


def _named(place: int, pair: PairRows) -> list[TrainSample]:
    sides = ((pair.chosen, CHOSEN), (pair.rejected, REJECTED))
    return [replace(row, key=f"{place}{sign}") for rows, sign in sides for row in rows]
