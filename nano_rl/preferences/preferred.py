"""Preference pairs that a training learns from beside its rollouts, some of them each step (see `dpo.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from nano_coder.runtime import OpenedWeights
from nano_rl.batch import Batch
from nano_rl.config import TrainConfig
from nano_rl.epochs import step_indices
from nano_rl.imitation.demonstrations import reader_of
from nano_rl.imitation.rows import Reader
from nano_rl.preferences.config import DpoConfig
from nano_rl.preferences.dpo import PairObjective, Scores, pair_batches, reference_scores
from nano_rl.preferences.pairs import PairRows, PreferencePair, pair_rows
from nano_shared.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """Pairs as the policy reads them, and what it gave them when its training began."""

    pairs: tuple[PairRows, ...]
    reference: Scores
    settings: DpoConfig
    batch: int
    """pairs of one step"""

    def draw(self, step: int) -> list[int]:
        """The places of a step's pairs: every pair comes once before any comes again."""
        size = len(self.pairs)
        return step_indices(step, size=size, batch=min(self.batch, size), seed=self.settings.seed)

    def batches(self, places: Sequence[int]) -> list[Batch]:
        return pair_batches(self.pairs, places, self.settings.max_tokens)

    def objective(self, places: Sequence[int]) -> PairObjective:
        return PairObjective(self.pairs, places, self.reference, self.settings)

    @property
    def run_ids(self) -> list[str]:
        return sorted({run for pair in self.pairs for run in pair.run_ids})


def open_preferred(
    model: nn.Module, opened: OpenedWeights, pairs: Sequence[PreferencePair], config: TrainConfig
) -> Preferred | None:
    """The pairs that `lambda_preference` weighs; None where it is 0 or there is none.

    `model` must hold the weights that the training begins from, also where it goes on from a state.
    """
    if config.lambda_preference == 0 or not pairs:
        return None
    reader = reader_of(opened)
    vocabulary = int(opened.loaded.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    rows = tuple(_rows(pair, reader, vocabulary) for pair in pairs)
    settings = DpoConfig(beta=config.preference_beta, seed=config.seed, max_tokens=config.max_tokens)
    return Preferred(
        pairs=rows, reference=reference_scores(model, rows, settings), settings=settings,
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
