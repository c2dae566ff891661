"""A training sample: one token row with its mask, behaviour log-probs and advantage."""

from __future__ import annotations

from dataclasses import dataclass

from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """Parallel arrays, checked where they are born; nothing downstream checks again."""

    ids: tuple[int, ...]
    """[L] the row as the model read and sampled it"""
    mask: tuple[int, ...]
    """[L] 1 exactly on tokens that this policy sampled in this rollout"""
    logprobs: tuple[float, ...]
    """[L] behaviour log-probs at the sampling temperature; 0 where the mask is 0"""
    versions: tuple[int, ...]
    """[L] policy version behind each token"""
    advantage: float
    run_id: str
    temperature: float = 1.0

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.mask), len(self.logprobs), len(self.versions)}
        if len(lengths) != 1:
            raise ValueError(
                f"run {self.run_id}: ids, mask, log-probs and versions differ in length: {lengths}"
            )
        if self.mask and self.mask[0]:
            raise ValueError(f"run {self.run_id}: the first token cannot be sampled, nothing comes before it")

    @property
    def num_action_tokens(self) -> int:
        return sum(self.mask)


def to_samples(trajectory: Trajectory, advantage: float) -> list[TrainSample]:
    """One sample a token row; every row of a rollout carries the rollout's one advantage.

    Raises ValueError where a turn has no tokens: such a run can imitate, it cannot be used for gradients.
    """
    rows: dict[int, list[int]] = {}
    for index, turn in enumerate(trajectory.turns):
        if turn.completion.tokens is None:
            raise ValueError(f"run {trajectory.id}: turn {index} is text-only, it has no ids and log-probs")
        rows.setdefault(turn.completion.tokens.row, []).append(index)
    return [_row(trajectory, indices, advantage) for indices in rows.values()]


def _row(trajectory: Trajectory, indices: list[int], advantage: float) -> TrainSample:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    temperatures = set()
    for index in indices:
        completion = trajectory.turns[index].completion
        tokens = completion.tokens
        assert tokens is not None
        context, sampled = len(tokens.context_ids), len(tokens.sampled_ids)
        ids += [*tokens.context_ids, *tokens.sampled_ids]
        mask += [0] * context + [1] * sampled
        logprobs += [0.0] * context + list(tokens.logprobs)
        versions += [completion.policy_version] * (context + sampled)
        temperatures.add(completion.sampling.temperature or 1.0)
    if len(temperatures) != 1:
        raise ValueError(f"run {trajectory.id}: one row was sampled at several temperatures: {temperatures}")
    return TrainSample(
        ids=tuple(ids),
        mask=tuple(mask),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        advantage=advantage,
        run_id=trajectory.id,
        temperature=temperatures.pop(),
    )
