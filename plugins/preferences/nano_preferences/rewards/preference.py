"""`preference`: the score of a reward model, mapped to 0..1 by the logistic function.

Other reward models plug in through `LOADERS`, which lists the functions that open a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pydantic import PrivateAttr

from nano_coder.run.execution import Runtime
from nano_rl.rewards.reward import Part, Score
from nano_shared.checkpoint import checkpoint_names, read_checkpoint, resolve_checkpoint
from nano_shared.errors import CheckpointError, ConfigError, UsageError
from nano_shared.files import checkpoints_dir
from nano_shared.snapshot import BlobStore
from nano_shared.types import Trajectory

RewardModel = Callable[[Sequence[Trajectory], BlobStore], Sequence[float]]
"""[G] trajectories and the blobs of their log -> [G] scores: log-odds of a pairwise preference model"""
Loader = Callable[[str], RewardModel | None]
"""opens a checkpoint by name; None if it is no reward model of this loader's kind"""


def _load_checkpoint(checkpoint: str) -> RewardModel | None:
    """A checkpoint of `nano-rl reward-model`."""
    try:
        resolve_checkpoint(checkpoint)
    except CheckpointError:
        return None  # another loader may know the name
    from nano_preferences.reward_checkpoint import open_reward_model

    return open_reward_model(checkpoint)


LOADERS: list[Loader] = [_load_checkpoint]


class Preference(Part):
    argument = "checkpoint"
    alone = True
    costly = True

    checkpoint: str | None = None
    """name of the reward model"""
    _model: RewardModel | None = PrivateAttr(None)

    @classmethod
    def unnamed(cls) -> str:
        """The only reward model on this machine. Raises UsageError if there is none or several."""
        known = [name for name in checkpoint_names() if _is_reward_model(name)]
        if not known:
            raise UsageError("preference=WEIGHT needs a reward model; nano-rl reward-model makes one")
        if len(known) > 1:
            raise UsageError(
                f"preference=WEIGHT could mean {', '.join(known)}; name one: preference:{known[0]}=WEIGHT"
            )
        return known[0]

    def prepare(self) -> None:
        if self.checkpoint is None:
            raise ConfigError("preference needs a reward model: preference:CHECKPOINT=WEIGHT")
        models = (load(self.checkpoint) for load in LOADERS)
        self._model = next((model for model in models if model is not None), None)
        if self._model is None:
            raise ConfigError(
                f"{self.checkpoint!r} is no reward model that this nano can open; name the checkpoint of one,"
                " or leave preference out"
            )

    def score(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Score]:
        assert self._model is not None  # `prepare` has opened it
        return [Score(value=_logistic(x)) for x in self._model(runs, runtime.store.blobs)]


def _is_reward_model(name: str) -> bool:
    try:
        return read_checkpoint(checkpoints_dir() / name).kind == "reward_model"
    except CheckpointError:
        return False  # a damaged checkpoint cannot be meant


def _logistic(x: float) -> float:
    if math.isnan(x):
        return x  # refused with the part's name by `checked`
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
