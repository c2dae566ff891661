"""The optimizer trains what requires a gradient, at a rate that is a pure function of the step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.learner import clip_gradients, lr_at, make_optimizer, set_lr
from nano_shared.errors import ConfigError


def rates(schedule: str, warmup: int = 0, steps: int = 4) -> list[float]:
    return [
        lr_at(step, peak=1.0, schedule=schedule, warmup_steps=warmup, steps=steps) for step in range(steps)
    ]


def test_rates_of_each_schedule() -> None:
    assert rates("constant") == [1, 1, 1, 1]
    assert rates("linear") == [1, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2])


def test_warm_up_rises_in_a_line_and_never_starts_at_zero() -> None:
    assert rates("constant", warmup=3, steps=6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates("linear", warmup=1, steps=3) == [0.5, 1, 0.5]


def test_rate_beyond_the_last_step_is_not_negative() -> None:
    for schedule in ("linear", "cosine"):
        assert lr_at(99, peak=1.0, schedule=schedule, warmup_steps=0, steps=4) == pytest.approx(0)


def test_frozen_weights_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model, OptimizerConfig())
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model[1].parameters()}
    with pytest.raises(ConfigError, match="nothing to train"):
        make_optimizer(model.requires_grad_(False), OptimizerConfig())


def test_nothing_decays() -> None:
    model = nn.Linear(2, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_low_precision_weights_are_refused() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"weight is torch\.bfloat16: updates would be rounded away"):
        make_optimizer(model, OptimizerConfig())


def test_rate_is_set_and_moves_the_weights_by_it() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = make_optimizer(model, OptimizerConfig())
    before = model.weight.item()
    set_lr(optimizer, 0.5)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    # the first step of Adam is the rate times the sign of the gradient
    assert model.weight.item() == pytest.approx(before - 0.5, abs=1e-6)


def test_gradients_are_clipped_together_and_the_norm_before_is_returned() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients(weights, 1.0) == 5.0
    assert [w.grad.item() for w in weights] == pytest.approx([0.6, 0.8], abs=1e-5)
    assert clip_gradients(weights, 10.0) == pytest.approx(1.0, abs=1e-5)
    assert weights[0].grad.item() == pytest.approx(0.6, abs=1e-5)


def test_non_finite_norm_is_returned() -> None:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([math.nan])
    assert math.isnan(clip_gradients([weight], 1.0))


def test_weights_of_two_precisions_are_clipped_together() -> None:
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16)
    assert clip_gradients(weights, 1.0) == 5.0
    assert [w.grad.item() for w in weights if w.grad is not None] == pytest.approx([0.6, 0.8], abs=5e-3)


@pytest.mark.slow
def test_states_of_8_bits_train_as_those_of_float32_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    target, found = torch.randn(128, 128), {}
    for states in ("8bit", "float32"):
        torch.manual_seed(1)
        model = nn.Linear(128, 128)
        config = OptimizerConfig(learning_rate=1e-2, states=states)

        def steps(optimizer: torch.optim.Optimizer, n: int, model: nn.Linear = model) -> None:
            for _ in range(n):
                (model.weight - target).square().mean().backward()
                model.bias.sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        first = make_optimizer(model, config)
        steps(first, 40)
        if states == "8bit":
            assert first.state[model.weight]["state1"].dtype == torch.uint8
            assert first.state[model.bias]["state1"].dtype == torch.float32
            torch.save((model.state_dict(), first.state_dict()), tmp_path / "state")
            steps(first, 10)
            ahead = model.weight.detach().clone()
            weights, saved = torch.load(tmp_path / "state")
            model.load_state_dict(weights)
            again = make_optimizer(model, config)
            again.load_state_dict(saved)
            steps(again, 10)
            assert torch.equal(model.weight, ahead)
        else:
            steps(first, 10)
        found[states] = model.weight.detach()
    moved = (found["float32"] - target).square().mean()
    assert (found["8bit"] - found["float32"]).square().mean() < 1e-3 * moved


def test_states_of_8_bits_without_the_library_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs bitsandbytes: pip install bitsandbytes"):
        make_optimizer(nn.Linear(3, 2), OptimizerConfig(states="8bit"))
