"""Samples are the rows exactly as they were read and sampled, and nothing else is trainable."""

from __future__ import annotations

from typing import Any

import pytest
from builders import trajectory, turn
from hypothesis import given
from hypothesis import strategies as st

from nano_rl.learn.groups import TrainSample, recent, to_samples
from nano_rl.learn.train_step import _stale
from nano_shared.types import REDACTED_ID, Sampling, Trajectory


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Rollouts of 1 to 6 turns in rows that begin with a prompt, some turns without tokens of their own."""
    turns, row = [], 0
    for index in range(draw(st.integers(1, 6))):
        new_row = index > 0 and draw(st.booleans())
        row += new_row
        first = index == 0 or new_row
        context = draw(st.lists(st.integers(0, 50), min_size=int(first), max_size=5))
        sampled = draw(st.lists(st.tuples(st.integers(0, 50), st.floats(-9, -0.01)), max_size=4))
        turns.append(
            turn(
                context, [i for i, _ in sampled], logprobs=[p for _, p in sampled], row=row, index=index,
                version=draw(st.integers(0, 3)),
            )
        )  # fmt: skip
    return trajectory(*turns)


def sample(**changes: Any) -> TrainSample:
    values = {
        "run_id": "r", "ids": (1, 2, 3), "mask": (0, 0, 1), "logprobs": (0.0, 0.0, -1.0),
        "versions": (0, 0, 0), "advantage": 1.0, "temperature": 1.0,
    }  # fmt: skip
    return TrainSample(**(values | changes))


@given(run=trajectories())
def test_ac_26_arrays_of_a_sample_have_one_length(run: Trajectory) -> None:
    for s in to_samples(run, 0.5):
        assert len(s.ids) == len(s.mask) == len(s.logprobs) == len(s.versions)


@pytest.mark.parametrize("field", ["ids", "mask", "logprobs", "versions"])
def test_ac_26_unequal_lengths_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="must be one"):
        sample(**{field: getattr(sample(), field)[1:]})


@given(run=trajectories())
def test_ac_27_mask_is_one_exactly_on_sampled_tokens(run: Trajectory) -> None:
    for row, s in enumerate(to_samples(run, 0.5)):
        deltas = [t.completion.tokens for t in run.turns if t.completion.tokens.row == row]
        sampled = [i for d in deltas for i in d.sampled_ids]
        context = [i for d in deltas for i in d.context_ids]
        assert [i for i, m in zip(s.ids, s.mask, strict=True) if m] == sampled
        assert [i for i, m in zip(s.ids, s.mask, strict=True) if not m] == context
        assert [p for p, m in zip(s.logprobs, s.mask, strict=True) if m] == [
            p for d in deltas for p in d.logprobs
        ]


def test_ac_27_assistant_turns_in_the_prompt_and_observations_are_context() -> None:
    # the prompt of a new row quotes earlier sampled tokens 7 8: they are read, not sampled, there
    run = trajectory(
        turn([1, 2], [7, 8]), turn([5], [9], index=1), turn([1, 2, 7, 8, 5], [6], row=1, index=2)
    )
    first, second = to_samples(run, 1.0)
    assert (first.ids, first.mask) == ((1, 2, 7, 8, 5, 9), (0, 0, 1, 1, 0, 1))
    assert (second.ids, second.mask) == ((1, 2, 7, 8, 5, 6), (0, 0, 0, 0, 0, 1))


def test_ac_27_text_only_rollout_is_refused_with_the_reason() -> None:
    run = trajectory(turn(2, 1), turn(2, 1, index=1, text_only=True))
    with pytest.raises(ValueError, match=r"'run-0' is text-only: turns \[1\] carry no token ids"):
        to_samples(run, 1.0)


def test_rollout_without_turns_is_refused() -> None:
    run = trajectory().model_copy(update={"turns": ()})
    with pytest.raises(ValueError, match="has no turns"):
        to_samples(run, 1.0)


def test_versions_are_those_of_the_call() -> None:
    (s,) = to_samples(trajectory(turn(2, 1, version=3), turn(1, 2, index=1, version=4)), 1.0)
    assert s.versions == (3, 3, 3, 4, 4, 4)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=20)])
def test_ac_20_truncated_sampling_is_refused_for_policy_gradients(sampling: Sampling) -> None:
    run = trajectory(turn(2, 1, sampling=sampling))
    with pytest.raises(ValueError, match="cover another support"):
        to_samples(run, 1.0)
    assert to_samples(run, 1.0, imitation=True)[0].temperature == 1.0


def test_greedy_sampling_is_refused_for_policy_gradients() -> None:
    run = trajectory(turn(2, 1, sampling=Sampling(temperature=0)))
    with pytest.raises(ValueError, match="sampled greedily"):
        to_samples(run, 1.0)
    assert to_samples(run, 1.0, imitation=True)[0].temperature == 1.0


def test_temperature_is_that_of_the_sampler_and_one_for_a_row() -> None:
    warm = Sampling(temperature=0.7)
    assert to_samples(trajectory(turn(2, 1, sampling=warm)), 1.0)[0].temperature == 0.7
    with pytest.raises(ValueError, match=r"temperatures \[0.7, 1.0\]"):
        to_samples(trajectory(turn(2, 1, sampling=warm), turn(2, 1, index=1)), 1.0)


def test_row_that_returns_is_refused() -> None:
    run = trajectory(turn(2, 1), turn(2, 1, row=1, index=1), turn(2, 1, row=0, index=2))
    with pytest.raises(ValueError, match="turn 2 returns to row 0"):
        to_samples(run, 1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask": (1, 0, 1), "logprobs": (-1.0, 0.0, -1.0)}, "first token of a row cannot be trained"),
        ({"mask": (0, 0, 2)}, "only 0 and 1"),
        ({"logprobs": (0.0, -1.0, -1.0)}, "token that was not sampled"),
        ({"advantage": float("nan")}, "must be finite"),
        ({"temperature": 0.0}, "positive"),
    ],
)
def test_malformed_sample_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sample(**changes)


def versions_0_to_2() -> list[TrainSample]:
    turns = [turn(2, 3, index=i, version=i) for i in range(3)]
    return [*to_samples(trajectory(*turns), 1.0), *to_samples(trajectory(turn(2, 2), run_id="old"), 1.0)]


@pytest.mark.parametrize(("max_staleness", "trained"), [(2, [9, 2]), (1, [6]), (0, [3])])
def test_ac_22_stale_tokens_alone_are_left_out(max_staleness: int, trained: list[int]) -> None:
    """At version 2. The tokens stay as context, and a row of which nothing is left to train goes."""
    samples = versions_0_to_2()
    left = [kept for sample in samples for kept in recent(sample, 2, max_staleness)]
    assert [s.num_action_tokens for s in left] == trained
    assert left[0].ids == samples[0].ids
    for version, m in zip(left[0].versions, left[0].mask, strict=True):
        assert m == 0 or version >= 2 - max_staleness


def test_ac_22_without_a_bound_every_token_stays() -> None:
    assert all(recent(sample, 99, None) == [sample] for sample in versions_0_to_2())


def test_ac_23_stale_tokens_are_counted_as_a_share_of_the_trained_ones() -> None:
    """Turns of versions 0, 1 and 2 with three tokens each, and two tokens of version 0: eight of eleven."""
    assert _stale(versions_0_to_2(), 2) == pytest.approx(8 / 11)
    assert _stale(versions_0_to_2()[1:], 0) == 0.0


def test_a_redacted_run_is_refused_for_both_losses_on_its_ids() -> None:
    run = trajectory(turn([1, REDACTED_ID], [3, 4]))
    for imitation in (False, True):
        with pytest.raises(ValueError, match="was redacted"):
            to_samples(run, 1.0, imitation=imitation)
