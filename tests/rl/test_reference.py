"""The reference of the KL term is what training began from: the model, or the adapter, as it was then."""

from __future__ import annotations

import pytest
import torch
from builders import tiny_llama
from test_logprob import ROWS, batch_of, lora
from torch import nn

from nano_rl.learn.learner import Reference, prepare
from nano_rl.learn.logprob import token_logprobs


def learnt_before() -> nn.Module:
    """A policy whose adapter changes what the bare model says, as one that was trained and saved."""
    return prepare(lora(tiny_llama()), lora_rank=0, seed=0)


KINDS = {
    "full": lambda: prepare(tiny_llama(), lora_rank=0, seed=0),
    "fresh adapter": lambda: prepare(tiny_llama(), lora_rank=4, seed=0),
    "adapter that has learnt": learnt_before,
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_scores_as_the_policy_did_at_the_start_and_leaves_the_policy_as_it_is(kind: str) -> None:
    model, batch = KINDS[kind](), batch_of(*ROWS)
    reference, at_the_start = Reference(model), token_logprobs(model, batch).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    moved = token_logprobs(model, batch).detach()
    (scored,) = reference.score([batch])
    assert scored.reference_logprobs_BT is not None
    assert torch.equal(scored.reference_logprobs_BT, at_the_start)
    assert not torch.equal(moved, at_the_start)
    assert torch.equal(token_logprobs(model, batch), moved)


def test_the_policy_gets_its_weights_back_where_scoring_fails() -> None:
    model = learnt_before()
    reference = Reference(model)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(AttributeError):
        reference.score([None])  # type: ignore[list-item]
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
