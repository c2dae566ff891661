"""Imitation as a term of a mixed loss: the negative log-likelihood of demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from nano_rl.imitation.rows import own_successes
from nano_rl.learn.model.logprob import TokenScores, loss_and_scores
from nano_rl.learn.objectives.loss import sft_loss
from nano_rl.learn.offline import step_indices
from nano_rl.learn.rows.batch import Batch, make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Rows that a training imitates beside its rollouts, some of them each step."""

    rows: tuple[TrainSample, ...]
    batch: int
    """rows of one step"""
    seed: int

    def draw(self, step: int) -> list[TrainSample]:
        """The rows of a step: every row comes once before any comes again."""
        size = len(self.rows)
        if size == 0:
            return []
        chosen = step_indices(step, size=size, batch=min(self.batch, size), seed=self.seed)
        return [self.rows[i] for i in chosen]

    @property
    def run_ids(self) -> list[str]:
        return sorted({row.run_id for row in self.rows})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationTerm:
    """`LossTerm`: a mean over the trained tokens of a step's demonstrations."""

    weight: float
    max_tokens: int
    """tokens of one micro-batch"""
    demonstrations: Demonstrations | None = None
    """None imitates a step's own successes"""
    name: str = "sft"

    def draw(self, step: int, groups: Sequence[Group]) -> Sequence[TrainSample]:
        return self.demonstrations.draw(step) if self.demonstrations else own_successes(groups)

    def part(self, drawn: Sequence[TrainSample], index: int, count: int, *, trees: bool) -> ImitationPart:
        # a stretch and not every count-th row: neighbours share prompts
        rows = drawn[len(drawn) * index // count : len(drawn) * (index + 1) // count]
        return ImitationPart(batches=make_batches(rows, max_tokens=self.max_tokens, trees=trees))

    @property
    def run_ids(self) -> list[str]:
        return self.demonstrations.run_ids if self.demonstrations else []


@dataclass(slots=True, kw_only=True)
class ImitationPart:
    """`TermPart`: the demonstrations of one minibatch."""

    batches: list[Batch]
    _tokens: float = field(default=0.0, init=False)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = loss_and_scores(model, batch, _nll, separable=True, entropy=False)
        self._tokens += metrics["tokens"]
        return loss, metrics

    def metrics(self) -> dict[str, float]:
        """`sft_tokens`"""
        return {"sft_tokens": self._tokens}


def _nll(scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    return sft_loss(scores.logprobs_BT, batch)
