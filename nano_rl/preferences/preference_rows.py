"""Preferences as a term of a mixed loss: pairs beside the rollouts of a training (loss: `dpo.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nano_coder.models.opening import OpenedWeights
from nano_rl.config.training import TrainConfig
from nano_rl.imitation.demonstrations import reader_of
from nano_rl.imitation.rows import Reader
from nano_rl.learn.offline import step_indices
from nano_rl.learn.rows.batch import Batch
from nano_rl.learn.rows.group import Group
from nano_rl.preferences.config import DpoConfig
from nano_rl.preferences.dpo import PairObjective, Scores, pair_batches, reference_scores
from nano_rl.preferences.pairs import PairRows, PreferencePair, pair_rows
from nano_shared.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceTerm:
    """`LossTerm`: a mean over a step's pairs, as the policy reads them."""

    weight: float
    pairs: tuple[PairRows, ...]
    reference: Scores
    """what the policy gave both sides when its training began"""
    settings: DpoConfig
    batch: int
    """pairs of one step"""
    name: str = "preference"

    def draw(self, step: int, groups: Sequence[Group]) -> list[int]:
        """The places of a step's pairs: every pair comes once before any comes again."""
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
    """None where a minibatch has none"""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        assert self.pairs is not None
        return self.pairs(model, batch)

    def metrics(self) -> dict[str, float]:
        """`preference_pairs`, `preference_accuracy` (pairs whose chosen side gained more) and
        `preference_margin`."""
        if self.pairs is None:
            return {}
        seen = self.pairs.metrics()
        return {
            "preference_pairs": float(self.pairs.count),
            "preference_accuracy": seen["accuracy"],
            "preference_margin": seen["margin"],
        }


def preference_term(
    model: nn.Module, opened: OpenedWeights, pairs: Sequence[PreferencePair], config: TrainConfig
) -> PreferenceTerm | None:
    """The pairs that `lambda_preference` weighs; None where it is 0 or there is none.

    `model` must hold the weights that the training begins from, also where it goes on from a state.
    """
    if config.lambda_preference == 0 or not pairs:
        return None
    reader = reader_of(opened)
    vocabulary = int(opened.loaded.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    rows = tuple(_rows(pair, reader, vocabulary) for pair in pairs)
    settings = DpoConfig(beta=config.preference_beta, seed=config.seed, max_tokens=config.max_tokens)
    return PreferenceTerm(
        weight=config.lambda_preference, pairs=rows, reference=reference_scores(model, rows, settings),
        settings=settings,
        batch=config.prompts_per_step,
    )  # fmt: skip


def _rows(pair: PreferencePair, reader: Reader, vocabulary: int) -> PairRows:
    """The logged tokens where they are this policy's, and the texts otherwise."""
    try:
        return pair_rows([pair], reader, vocabulary=vocabulary)[0]
    except UsageError:
        if pair.exact is None:
            raise
        return pair_rows([pair.model_copy(update={"exact": None})], reader, vocabulary=vocabulary)[0]
