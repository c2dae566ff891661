"""Micro-batches: the budget, the padding, and the one denominator that makes every split equal."""

from __future__ import annotations

import pytest
import torch
from builders import terms, tiny_llama, trajectory, turn
from hypothesis import given
from hypothesis import strategies as st

from nano_rl.learn.batch import ENOUGH, Batch, make_batches
from nano_rl.learn.groups import TrainSample, to_samples
from nano_rl.learn.logprob import score_tokens, token_logprobs
from nano_rl.learn.loss import mean_metrics, policy_loss, sft_loss
from nano_rl.learn.prefix_tree import build_tree


def samples(lengths: list[tuple[int, int]]) -> list[TrainSample]:
    """Single-turn samples of (context, sampled) tokens, with advantages that differ."""
    return [
        to_samples(trajectory(turn(context, sampled), run_id=f"run-{i}"), 0.5 - i)[0]
        for i, (context, sampled) in enumerate(lengths)
    ]


LENGTHS = [(2, 3), (4, 7), (1, 1), (3, 5), (2, 9), (6, 2)]


@pytest.mark.some(5)
@pytest.mark.parametrize("loss", ["policy", "kl", "sft"])
@pytest.mark.parametrize("max_tokens", [1, 12, 25, 40])
def test_ac_10_microbatch_invariance(loss: str, max_tokens: int) -> None:
    def gradient(max_tokens: int) -> tuple[torch.Tensor, float]:
        model, total = tiny_llama(), 0.0
        for batch in make_batches(samples(LENGTHS), max_tokens=max_tokens, dtype=torch.float64):
            logprobs = token_logprobs(model, batch)
            if loss == "sft":
                part, metrics = sft_loss(logprobs, batch)
            else:
                beta = 0.1 if loss == "kl" else 0.0
                batch = batch.with_reference(logprobs.detach() - 0.3)
                part, metrics = policy_loss(logprobs, batch, terms(beta=beta))
            part.backward()
            total += metrics["loss"]
        return torch.cat([p.grad.flatten() for p in model.parameters()]), total

    whole, whole_loss = gradient(10_000)
    split, split_loss = gradient(max_tokens)
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-10)
    assert split_loss == pytest.approx(whole_loss, abs=1e-10)


def test_ac_10_the_order_of_the_samples_does_not_change_the_gradient() -> None:
    def gradient(rows: list[TrainSample]) -> torch.Tensor:
        model = tiny_llama()
        for batch in make_batches(rows, max_tokens=20, dtype=torch.float64):
            policy_loss(token_logprobs(model, batch), batch, terms())[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    rows = samples(LENGTHS)
    torch.testing.assert_close(gradient(rows[::-1]), gradient(rows), rtol=0, atol=1e-10)


def test_ac_10_metrics_of_micro_batches_add_up_to_those_of_the_whole() -> None:
    def metrics(max_tokens: int) -> dict[str, float]:
        parts = []
        for batch in make_batches(samples(LENGTHS), max_tokens=max_tokens, dtype=torch.float64):
            scores = score_tokens(tiny_llama(), batch)
            batch = batch.with_old(scores.logprobs_BT.detach() * 1.1).with_reference(scores.logprobs_BT - 0.2)
            config = terms(beta=0.1)
            parts.append(policy_loss(scores.logprobs_BT, batch, config, entropy_BT=scores.entropy_BT)[1])
        return mean_metrics(parts)

    whole = metrics(10_000)
    assert whole["tokens"] == sum(sampled for _, sampled in LENGTHS)
    assert metrics(12) == pytest.approx(whole, rel=1e-9)


def test_denominator_is_that_of_the_whole_step_in_every_micro_batch() -> None:
    batches = make_batches(samples(LENGTHS), max_tokens=12)
    assert len(batches) > 1
    assert torch.cat([b.weight_BT[b.mask_BT] for b in batches]).tolist() == pytest.approx([1 / 27] * 27)


def test_two_ranks_with_the_common_denominator_equal_one() -> None:
    rows, n = samples(LENGTHS), sum(sampled for _, sampled in LENGTHS)

    def total(rows: list[TrainSample]) -> float:
        batches = make_batches(rows, max_tokens=30, weights=[1 / n] * len(rows), dtype=torch.float64)
        return sum(sft_loss(token_logprobs(tiny_llama(), b), b)[0].item() for b in batches)

    assert total(rows[:2]) + total(rows[2:]) == pytest.approx(total(rows), abs=1e-12)


def test_padding_is_on_the_right_and_carries_nothing() -> None:
    (batch,) = make_batches(samples([(1, 1), (2, 3)]), max_tokens=100)
    assert batch.run_ids == ("run-1", "run-0")
    assert batch.attention_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.mask_BT.tolist() == [[False, False, True, True, True], [False, True, False, False, False]]
    assert batch.ids_BT[1].tolist() == [1, 3, 0, 0, 0]
    assert batch.advantages_BT.tolist() == [[0, 0, -0.5, -0.5, -0.5], [0, 0.5, 0, 0, 0]]
    assert batch.behaviour_logprobs_BT[1, 1:].tolist() == pytest.approx([-0.1, 0, 0, 0])


def test_row_longer_than_the_budget_is_alone() -> None:
    batches = make_batches(samples([(2, 2), (2, 8), (2, 2)]), max_tokens=8)
    assert [b.run_ids for b in batches] == [("run-1",), ("run-0", "run-2")]


def test_nothing_to_batch() -> None:
    assert make_batches([], max_tokens=8) == []


def test_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        make_batches(samples([(2, 2)]), max_tokens=0)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), max_size=9), budget=st.integers(1, 40)
)
def test_every_row_is_in_one_micro_batch_within_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    for trees, cost in ((True, nodes), (False, lambda b: b.ids_BT.numel())):
        batches = make_batches(samples(lengths), max_tokens=budget, trees=trees)
        runs = sorted(r for b in batches for r in b.run_ids)
        assert runs == sorted(f"run-{i}" for i in range(len(lengths)))
        assert all(cost(b) <= budget or len(b.run_ids) == 1 for b in batches)
        assert sum(int(b.mask_BT.sum()) for b in batches) == sum(sampled for _, sampled in lengths)
        worst = [cost(b) if trees else b.ids_BT.shape[1] for b in batches]
        assert worst == sorted(worst, reverse=True)


def nodes(batch: Batch) -> int:
    return build_tree(batch.ids_BT, batch.attention_BT.sum(1).tolist()).num_nodes


def test_a_group_counts_its_prompt_once_and_stays_together() -> None:
    groups = [
        to_samples(trajectory(turn([group, *range(1, 10)], [rollout, 5]), run_id=f"{group}-{rollout}"), 1.0)[
            0
        ]
        for rollout in range(3)
        for group in range(2)
    ]
    batches = make_batches(groups, max_tokens=10 + 3 * 2)
    assert [b.run_ids for b in batches] == [("0-0", "0-1", "0-2"), ("1-0", "1-1", "1-2")]
    # without trees the same budget holds one padded row
    assert len(make_batches(groups, max_tokens=10 + 3 * 2, trees=False)) == 6


def test_groups_that_share_little_are_parted_once_there_is_enough_to_do() -> None:
    def group(start: list[int], prompt: int, sampled: int) -> list[TrainSample]:
        rows = range(4)
        runs = [
            trajectory(turn([*start, *range(prompt)], [i] * sampled), run_id=f"{start}-{i}") for i in rows
        ]
        return [to_samples(run, 1.0)[0] for run in runs]

    large = group([1, 1], ENOUGH // 2, ENOUGH // 4), group([1, 2], ENOUGH // 2, ENOUGH // 4)
    parts = make_batches([*large[0], *large[1]], max_tokens=4 * ENOUGH)
    # a group is never parted below `max_tokens`, for its prompt would be forwarded again
    assert [len(set(b.run_ids)) for b in parts] == [4, 4]
    assert all(nodes(b) > ENOUGH for b in parts)
    # what two groups have in common is a prefix like any other
    common = [*range(ENOUGH // 4)]
    together = group([*common, 1], 8, 8) + group([*common, 2], ENOUGH, 8)
    assert len(make_batches(together, max_tokens=4 * ENOUGH)) == 1
    # and small groups do not become small micro-batches
    small = group([1, 1], 8, 8) + group([1, 2], 8, 8)
    assert len(make_batches(small, max_tokens=4 * ENOUGH)) == 1


def test_moving_a_batch_moves_every_tensor_and_keeps_the_rest() -> None:
    (batch,) = make_batches(samples([(2, 3)]), max_tokens=100)
    moved = batch.to("meta")
    assert moved.ids_BT.is_meta
    assert moved.temperature_B.is_meta
    assert (moved.run_ids, moved.old_logprobs_BT) == (("run-0",), None)
