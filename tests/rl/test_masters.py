"""float32 masters: what bfloat16 would round away adds up, and the model stays the one working copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import tiny_llama
from families import adapted, one_batch, sample
from torch import Tensor, nn

from nano_rl.learn.batch import Batch
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.learner import Learner, MasterWeights
from nano_rl.learn.logprob import token_logprobs
from nano_rl.learn.loss import sft_loss
from nano_rl.resume import load_tree, save_tree

BATCH = one_batch([sample([1, 2, 3, 4], [0, 1, 1, 1], 0), sample([1, 2, 5], [0, 0, 1], 1)], torch.float32)


def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    return sft_loss(token_logprobs(model, batch), batch)


def learner(model: nn.Module, rate: float = 1e-6) -> Learner:
    return Learner(model, OptimizerConfig(learning_rate=rate), steps=1000)


@pytest.mark.slow
def test_updates_below_the_last_place_of_bfloat16_add_up_in_the_masters() -> None:
    model = tiny_llama(torch.bfloat16)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    teacher = learner(model)
    teacher.update([BATCH], objective, lambda metrics: None)
    master = teacher._trained["model.layers.0.mlp.up_proj.weight"]
    assert master.dtype is torch.float32
    moved = (master - before.float()).abs()
    assert 0 < moved.max() < 1.1e-6
    large = before.abs() > 0.1
    assert torch.equal(weight[large], before[large])  # one such step does not show at that size
    for _ in range(400):
        teacher.update([BATCH], objective, lambda metrics: None)
    assert not torch.equal(weight[large], before[large])
    assert torch.equal(weight, master.to(torch.bfloat16))


def test_gradients_of_micro_batches_add_up_in_float32_and_the_working_copy_keeps_none() -> None:
    model = tiny_llama(torch.bfloat16)
    masters = MasterWeights(model)
    single = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    small = MasterWeights(single)
    for gradient in (1.0, 2**-9, 2**-9):  # bfloat16 would lose both small ones
        (single.weight * gradient).sum().backward()
    assert small.parameters["weight"].grad.item() == 1.0 + 2**-8
    objective(model, BATCH)[0].backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(m.grad is not None and m.grad.dtype is torch.float32 for m in masters.parameters.values())


def test_gradients_are_taken_where_code_of_users_switched_them_off() -> None:
    with torch.no_grad():
        norms = learner(tiny_llama(torch.float32)).update([BATCH], objective, lambda metrics: None)
    assert norms["grad_norm"] > 0


def test_float32_weights_and_adapters_are_their_own_masters() -> None:
    model = tiny_llama(torch.float32)
    assert MasterWeights(model).parameters["model.norm.weight"] is model.model.norm.weight
    lora = adapted(tiny_llama(torch.bfloat16))
    for parameter in lora.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    masters = MasterWeights(lora).parameters
    assert all("lora_" in name for name in masters)
    assert all(m is dict(lora.named_parameters())[name] for name, m in masters.items())
    norms = learner(lora, 1e-3).update([BATCH], objective, lambda metrics: None)
    assert norms["grad_norm"] > 0


def test_a_resumed_run_continues_from_the_masters_not_from_the_rounded_weights(tmp_path: Path) -> None:
    through = learner(tiny_llama(torch.bfloat16))
    for _ in range(3):
        through.update([BATCH], objective, lambda metrics: None)
    save_tree(tmp_path, "state", through.state())
    again = learner(tiny_llama(torch.bfloat16))
    again.restore(load_tree(tmp_path, "state"))
    for one in (through, again):
        one.update([BATCH], objective, lambda metrics: None)
    for name, master in through._trained.items():
        assert torch.equal(master, again._trained[name])
    for a, b in zip(through.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
