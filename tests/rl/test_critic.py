"""The critic: its loss by value, its start, masks and state, and that it learns what follows a prompt."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from builders import tiny_llama, trajectory, turn

from nano_preferences.critic import (
    Chain,
    Critic,
    CriticTerms,
    by_budget,
    explained_variance,
    reward_chain,
    scalar_model,
    value_loss,
)
from nano_rl.learn.learner import prepare
from nano_rl.learn.logprob import independent_rows
from nano_shared.errors import GuardTripped

FAST = CriticTerms(learning_rate=0.02, whiten=False, value_clip=None)


def critic(terms: CriticTerms = FAST, *, lora_rank: int = 0, max_tokens: int = 64) -> Critic:
    model = prepare(tiny_llama(torch.float32), lora_rank=lora_rank, seed=0)
    return Critic(model, steps=30, lora_rank=lora_rank, max_tokens=max_tokens, seed=0, terms=terms)


def chains() -> list[Chain]:
    """Whatever is sampled after a prompt of threes earns 1, after one of fives nothing."""
    runs = []
    for i, (token, reward) in enumerate([(3, 1.0), (5, 0.0), (3, 1.0), (5, 0.0)]):
        run = trajectory(turn([token] * (2 + i), [7, 1]), turn([2], [8], index=1), run_id=f"run-{i}")
        runs.append(reward_chain(run, [0.0, reward]))
    return runs


def test_value_loss_is_the_larger_of_plain_and_clipped() -> None:
    values = torch.tensor([1.0, 0.1, -1.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    old = torch.tensor([0.0, 0.0, -0.9], dtype=torch.float64)
    plain, none = value_loss(values, returns, old, clip=None)
    assert plain.tolist() == pytest.approx([0.0, 0.405, 1.125])
    assert not none.any()
    # clipped to .2, .1 and -1 around the old values: only the first has moved too far
    loss, clipped = value_loss(values, returns, old, clip=0.2)
    assert loss.tolist() == pytest.approx([0.32, 0.405, 1.125])
    assert clipped.tolist() == [True, False, False]


def test_value_loss_gradient_is_that_of_finite_differences_and_zero_where_clipped() -> None:
    values = torch.tensor([1.0, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    old = torch.tensor([0.0, 0.0, -0.9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, old, clip=0.2)[0].sum(), (values,))
    value_loss(values, returns, old, clip=0.2)[0].sum().backward()
    assert values.grad is not None
    assert values.grad[0] == 0


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_critic_starts_from_the_policy_and_expects_nothing(lora_rank: int) -> None:
    policy = prepare(tiny_llama(torch.float32), lora_rank=lora_rank, seed=0)
    model = scalar_model(policy, lora_rank=lora_rank, seed=0, bias=True)
    ids = torch.tensor([[1, 4, 2, 8]])
    assert model(ids, torch.ones_like(ids)).tolist() == [[0.0] * 4]
    inner = policy.get_base_model() if lora_rank else policy
    hidden = inner.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(model.backbone(input_ids=ids).last_hidden_state, hidden)
    assert model.head.weight.dtype == torch.float32
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"head.weight", "head.bias"} <= trained
    assert all("lora_" in n or n.startswith("head.") for n in trained) == bool(lora_rank)


def test_values_stand_before_their_tokens_and_see_nothing_after_them() -> None:
    one = critic()
    torch.nn.init.normal_(one.model.head.weight, generator=torch.Generator().manual_seed(1))
    full = reward_chain(trajectory(turn([3, 4], [7, 1])), [1.0]).rows[0]
    other = reward_chain(trajectory(turn([3, 4], [7, 9])), [1.0]).rows[0]
    (before, after), (same, changed) = (one.values([row])[0][2:] for row in (full, other))
    # the value before a token does not know the token
    assert (before, after) == (same, changed)
    assert before != after
    assert one.values([full])[0][:2] == (0, 0)


def test_values_do_not_depend_on_the_micro_batches() -> None:
    rows = [row for chain in chains() for row in chain.rows]
    results = []
    for max_tokens in (1, 1000):
        one = critic(max_tokens=max_tokens)
        torch.nn.init.ones_(one.model.head.weight)
        results.append(one.values(rows))
    for a, b in zip(*results, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_an_update_does_not_depend_on_the_micro_batches() -> None:
    weights = []
    for max_tokens in (1, 1000):
        one = critic(max_tokens=max_tokens)
        torch.nn.init.ones_(one.model.head.weight)
        one.update([row for of in one.rows(chains()) for row in of], ends_step=True)
        weights.append(torch.cat([p.detach().flatten() for p in one.model.parameters()]))
    # Adam divides by the gradient's own size, so rounding shows where a gradient is nearly 0
    assert (weights[0] - weights[1]).abs().mean() < 1e-4


def test_it_learns_which_prompts_pay() -> None:
    one = critic()
    losses = []
    for _ in range(30):
        critic_rows = [row for of in one.rows(chains()) for row in of]
        losses.append(one.update(critic_rows, ends_step=True)["value_loss"])
    assert losses[0] == pytest.approx(0.25)  # half of the mean square of (1, 0, 1, 0)
    assert losses[-1] < 0.02
    critic_rows = [row for of in one.rows(chains()) for row in of]
    assert explained_variance(critic_rows)["value_explained"] > 0.8
    # what was expected is no advantage
    assert max(abs(a) for row in critic_rows for a in row.sample.advantages) < 0.5


def test_before_it_knows_anything_the_advantage_is_the_return() -> None:
    critic_rows = [row for of in critic().rows(chains()) for row in of]
    for row, reward in zip(critic_rows, [1.0, 0.0, 1.0, 0.0], strict=True):
        assert row.sample.advantages == tuple(reward * m for m in row.sample.mask)


def test_whitening_is_over_the_whole_step() -> None:
    critic_rows = [row for of in critic(replace(FAST, whiten=True)).rows(chains()) for row in of]
    flat = [a for x in critic_rows for a, m in zip(x.sample.advantages, x.sample.mask, strict=True) if m]
    assert flat == pytest.approx([1.0, 1, 1, -1, -1, -1] * 2, abs=1e-6)


def test_its_state_goes_on_as_if_nothing_had_happened() -> None:
    one, two = critic(), critic()
    critic_rows = [row for of in one.rows(chains()) for row in of]
    for _ in range(2):
        one.update(critic_rows, ends_step=True)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    two.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for c in (one, two):
        c.update(critic_rows, ends_step=True)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_prompt_that_rollouts_share_is_read_once_and_nothing_else_changes() -> None:
    group = [reward_chain(trajectory(turn([3] * 60, [7, i])), [1.0 * i]) for i in range(4)]
    read, values = [], []
    for apart in (False, True):
        one = critic(max_tokens=1000)
        torch.nn.init.ones_(one.model.head.weight)
        with independent_rows(one.model.causal) if apart else nullcontext():
            critic_rows = [row for of in one.rows(group) for row in of]
            with one.model.backbone.embed_tokens.register_forward_hook(
                lambda _module, inputs, _out: read.append(inputs[0].numel())
            ):
                one.update(critic_rows, ends_step=True)
        values.append([row.values for row in critic_rows])
    assert read == [60 + 4 * 2 - 1 * 3, 4 * 62]
    for together, alone in zip(*values, strict=True):
        assert together == pytest.approx(alone, abs=1e-5)


def test_a_critic_that_diverges_stops_the_run_and_keeps_its_weights() -> None:
    one = critic()
    (row,) = one.rows(chains()[:1])[0]
    broken = type(row)(sample=row.sample, returns=tuple(math.inf for _ in row.returns), values=row.values)
    before = one.model.head.bias.item()
    with pytest.raises(GuardTripped, match="the critic's loss is inf; go on"):
        one.update([broken], ends_step=True)
    assert one.model.head.bias.item() == before


def test_rows_are_cut_by_budget_longest_first() -> None:
    assert by_budget([2, 5, 3, 1], 6) == [[1], [2, 0], [3]]
    assert by_budget([9], 6) == [[0]]
