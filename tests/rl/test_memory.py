"""What saves memory changes no number, or no more than it says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from test_architectures import fixed_batch, likelihood, step

from integration.tiny_model import build_tiny
from nano_rl.learn.critic import scalar_model
from nano_rl.learn.learner import prepare
from nano_rl.learn.logprob import plain_rows, token_logprobs
from nano_shared.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:tree_fallback")


def gradients(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a batch, and the bytes that the forward pass kept for them beside the weights."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = likelihood(model, fixed_batch())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "lfm2", "gpt2"])
def test_checkpointed_layers_have_the_same_gradients(family: str, lora_rank: int) -> None:
    plain = prepare(build(family), lora_rank=lora_rank, seed=0)
    again = prepare(build(family), lora_rank=lora_rank, seed=0, gradient_checkpointing=True)
    again.train()  # dropout stays off in the second pass too
    expected, much = gradients(plain)
    found, little = gradients(again)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0, msg=name)
    assert little < 0.7 * much


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_layer_that_is_computed_again_walks_its_own_modules(
    lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-batch reads each module a few times, however many layers there are."""

    def walks(layers: int) -> float:
        model = prepare(
            build("llama", num_hidden_layers=layers), lora_rank=lora_rank, seed=0, gradient_checkpointing=True
        )
        gradients(model)  # what is tested once
        visited, walk = 0, torch.nn.Module.named_modules

        def counted(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal visited
            for found in walk(self, *args, **options):
                visited += not args  # of the outermost call
                yield found

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, "named_modules", counted)
            gradients(model)
        return visited / len(list(model.modules()))

    few, many = walks(2), walks(8)
    assert 0 < many < 1.2 * few


def test_checkpointing_is_off_where_nothing_is_learned() -> None:
    model = prepare(build("llama"), lora_rank=0, seed=0, gradient_checkpointing=True)
    batch = fixed_batch()
    with torch.no_grad():
        together = token_logprobs(model, batch)
        with plain_rows(model):
            torch.testing.assert_close(token_logprobs(model, batch), together, rtol=0, atol=1e-5)
    assert not any(module.training for module in model.modules())


def test_a_critic_of_a_checkpointed_policy_is_checkpointed_too() -> None:
    policy = prepare(build("llama"), lora_rank=0, seed=0, gradient_checkpointing=True)
    scalar = scalar_model(policy, lora_rank=0, seed=0, bias=True)
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in scalar.modules())


def quantised(folder: Path, bits: Any, dtype: Any) -> Any:
    pytest.importorskip("bitsandbytes")  # which `make test-all` installs
    from nano_coder.models.weights import load_policy

    return load_policy(str(folder), dtype=dtype, quantise=bits).model


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantised_base_samples_and_trains_as_itself(bits: str, tmp_path: Path) -> None:
    from nano_coder.models.local.continuous_batching import ContinuousDecoder
    from nano_coder.models.local.engine import Engine
    from nano_coder.models.local.sampler import GenerationRequest
    from nano_shared.types import Sampling

    texts = ["def add(a, b):\n    return a + b\n", "naive\n"] * 5
    base = quantised(build_tiny(tmp_path, texts, hidden=64, layers=1), bits, "bfloat16")
    with pytest.raises(ConfigError, match="weights of 4 or 8 bits cannot be trained themselves"):
        prepare(base, lora_rank=0, seed=0)
    model = prepare(base, lora_rank=2, seed=0)
    assert any(type(m).__name__ in ("Linear4bit", "Linear8bit") for m in model.modules())
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, fixed_batch())
        engine = Engine(model, eos_ids=frozenset(), context_limit=100)
        request = GenerationRequest(tuple(range(3, 20)), Sampling(max_tokens=6), 1, 1)
        (sampled,) = engine.generate([request])
        (scored,) = engine.score([request.ids + sampled.ids], first=len(request.ids))
    assert isinstance(engine.decoder, ContinuousDecoder)
    assert max(abs(a - b) for a, b in zip(scored, sampled.logprobs, strict=True)) < 0.1
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], old) for name, old in before.items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_an_adapter_on_a_quantised_base_follows_the_gradient_of_what_is_sampled(
    bits: str, tmp_path: Path
) -> None:
    """bitsandbytes has faster products for inference on a CPU: of other numbers, and without a gradient."""
    from nano_coder.models.local.engine import Engine
    from nano_coder.models.local.sampler import GenerationRequest
    from nano_shared.types import Sampling

    texts = ["def add(a, b):\n    return a + b\n", "naive\n"] * 5
    model = prepare(
        quantised(build_tiny(tmp_path, texts, hidden=64, layers=2), bits, "float32"), lora_rank=2, seed=0
    )
    weights = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(0)
    for weight in weights:
        torch.nn.init.normal_(weight, std=0.1)
    engine = Engine(model, eos_ids=frozenset(), context_limit=100)
    requests = [GenerationRequest(tuple(range(3, 20 + n)), Sampling(max_tokens=6), n, n) for n in range(3)]
    for request in requests:  # alone: one token a step
        (sampled,) = engine.generate([request])
        (scored,) = engine.score([request.ids + sampled.ids], first=len(request.ids))
        assert max(abs(a - b) for a, b in zip(scored, sampled.logprobs, strict=True)) < 1e-4
    together = engine.generate(requests)
    assert [row.ids for row in together] == [engine.generate([request])[0].ids for request in requests]

    loss, _ = likelihood(model, fixed_batch())
    loss.backward()
    step_size = 1e-3
    along = sum(float(w.grad.square().sum()) for w in weights if w.grad is not None) ** 0.5

    def moved(by: float) -> float:
        with torch.no_grad():
            for weight in weights:
                assert weight.grad is not None
                weight += weight.grad / along * by
            return likelihood(model, fixed_batch())[0].item()

    slope = (moved(step_size) - moved(-2 * step_size)) / (2 * step_size)
    assert slope == pytest.approx(along, rel=0.02)
