"""FlashAttention over token trees. A CPU lacks PyTorch's kernels: what they are asked is computed plainly."""

from __future__ import annotations

import pytest
import torch
from families import forking_rows
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nano_rl.learn import prefix_tree
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.prefix_tree import FlashPass, TokenTree, build_tree, flash_passes, tree_attention

HEADS, KEYS, DIM, SCALE = 4, 2, 8, 0.3


def scores_of(one: FlashPass, query: Tensor, key: Tensor) -> Tensor:
    """[H, n, m] scores, minus infinity outside of the stretches."""
    scores = torch.einsum("nhd,mhd->hnm", query, key.repeat_interleave(HEADS // KEYS, 1)) * SCALE
    part_n, part_m = (
        torch.bucketize(torch.arange(len(x)), bounds[1:], right=True)
        for x, bounds in ((query, one.bounds_q), (key, one.bounds_k))
    )
    seen = part_n[:, None] == part_m
    if one.causal:  # aligned at the ends of both stretches
        from_end_n, from_end_m = (
            bounds[1:][part] - torch.arange(len(part))
            for part, bounds in ((part_n, one.bounds_q), (part_m, one.bounds_k))
        )
        seen &= from_end_n[:, None] <= from_end_m
    return scores.masked_fill(~seen, -torch.inf)


def flash(
    one: FlashPass, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = scores_of(one, one.queries(query), one.keys(key))
    values = one.keys(value).repeat_interleave(HEADS // KEYS, 1)
    assert one.longest_q == int(one.bounds_q.diff().max())
    assert one.longest_k == int(one.bounds_k.diff().max())
    out = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
    return out, scores.logsumexp(-1), torch.empty(0), torch.empty(0)


def flash_backward(
    one: FlashPass, inputs: tuple[Tensor, Tensor, Tensor], grad: Tensor, out: Tensor, lse: Tensor,
    rng: list[Tensor], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = one.queries(inputs[0]), one.keys(inputs[1]), one.keys(inputs[2])
    g, o = one.queries(grad), one.queries(out)
    lse = lse if one.queries_n is None else lse[:, one.queries_n]
    k_wide, v_wide = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
    weights = (scores_of(one, q, k) - lse[..., None]).exp()
    inner = torch.einsum("nhd,mhd->hnm", g, v_wide) - (g * o).sum(-1).t()[..., None]
    d_scores = weights * inner * SCALE
    d_k, d_v = (
        torch.einsum("hnm,nhd->mhd", x, y).unflatten(1, (KEYS, -1)).sum(2)
        for x, y in ((d_scores, q), (weights, g))
    )
    return torch.einsum("hnm,mhd->nhd", d_scores, k_wide), d_k, d_v


def attended(tree: TokenTree) -> list[Tensor]:
    """Outputs and gradients of queries, keys and values."""
    made = torch.Generator().manual_seed(0)
    given_ = [
        torch.randn(n, tree.num_nodes, DIM, generator=made).requires_grad_() for n in (HEADS, KEYS, KEYS)
    ]
    out = tree_attention(*given_, tree, SCALE)
    return [out, *torch.autograd.grad(out, given_, torch.randn(out.shape, generator=made))]


@given(forking_rows(), st.sampled_from([0, 1, 8]))
def test_passes_of_flash_attention_are_the_attention_along_the_tree(
    samples: list[TrainSample], copies: int
) -> None:
    width = max(len(s.ids) for s in samples)
    ids_BT = torch.tensor([[*s.ids, *[0] * (width - len(s.ids))] for s in samples])
    tree = build_tree(ids_BT, [len(s.ids) for s in samples])
    plain = attended(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "_MAX_KEYS_PER_NODE", copies)
        flash_passes.cache_clear()
        patch.setattr(prefix_tree, "has_flash", lambda query: True)
        patch.setattr(prefix_tree, "flash", flash)
        patch.setattr(prefix_tree, "flash_backward", flash_backward)
        for one, other in zip(plain, attended(tree), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_group_needs_one_pass_with_a_copy_of_the_prompt_for_each_row() -> None:
    (one,) = flash_passes(tree_of_a_group())
    assert one.causal
    assert one.bounds_q.tolist() == [0, 5, 7, 9, 11]
    assert one.bounds_k.tolist() == [0, 5, 10, 15, 20]


def test_a_group_with_too_long_a_prompt_needs_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "_MAX_KEYS_PER_NODE", 1)
    own, shared = flash_passes(tree_of_a_group())
    assert own.causal
    assert not shared.causal
    # the first row lies in one run with the prompt
    assert shared.bounds_q.tolist() == [0, 6]
    assert shared.bounds_k.tolist() == [0, 3]


def tree_of_a_group() -> TokenTree:
    return build_tree(torch.tensor([[1, 2, 3, row, 5] for row in range(4)]), [5] * 4)
