"""Every family that nano names: sampled, scored, trained, saved and loaded as plain transformers does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import FAMILIES, VOCABULARY, build
from families import sample
from torch import Tensor, nn

from nano_coder.models.local.continuous_batching import ContinuousDecoder
from nano_coder.models.local.engine import Engine, ModuleDecoder
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.learner import Learner, lora_targets, prepare
from nano_rl.learn.logprob import refuse_untrainable, token_logprobs
from nano_shared.errors import ConfigError
from nano_shared.types import Sampling

pytestmark = [
    pytest.mark.filterwarnings("ignore:tree_fallback"),
]

EXACT = 1e-5
"""largest difference to plain transformers in float32, nats"""
GENERAL = {"lfm2", "qwen3-next", "gpt2", "gpt-neox"}
"""families that decode by the forward pass of transformers"""


def lora(family: str) -> Any:
    """The model under a new adapter on all linear layers, whose effect is not nil."""
    model = prepare(build(family), lora_rank=2, seed=0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def plain_logprobs(model: Any, ids: tuple[int, ...], temperature: float = 1.0) -> Tensor:
    """[L - 1] log-probs of all tokens but the first."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    logprobs: Tensor = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@torch.no_grad()
def deviation(model: Any, row: DecodingRow) -> float:
    """Largest difference of the row's log-probs to plain transformers."""
    prompt, sampled = row.request.ids, row.sampled()
    plain = plain_logprobs(model, prompt + sampled.ids)[len(prompt) - 1 :]
    return float((plain - torch.tensor(sampled.logprobs)).abs().max())


def samples_of(rows: list[DecodingRow]) -> list[Any]:
    """The rows as samples, two of them at another temperature."""
    return [
        sample(
            (*row.request.ids, *row.ids), [0] * len(row.request.ids) + [1] * len(row.ids), n,
            0.7 if n > 2 else 1.0,
        )
        for n, row in enumerate(rows)
    ]  # fmt: skip


def batch_of(samples: list[Any]) -> Batch:
    (batch,) = make_batches(samples, max_tokens=10_000, dtype=torch.float32)
    return batch


def rows_of(batch: Batch) -> list[tuple[tuple[int, ...], list[int], float]]:
    """Ids, mask and temperature of each row, as the batch orders them."""
    return [
        (tuple(ids[: sum(attention)]), mask, float(temperature))
        for ids, attention, mask, temperature in zip(
            batch.ids_BT.tolist(), batch.attention_BT.tolist(), batch.mask_BT.tolist(),
            batch.temperature_B.tolist(), strict=True,
        )
    ]  # fmt: skip


def prompts(count: int = 4) -> list[GenerationRequest]:
    """Two pairs of the same prompt, of several lengths and limits."""
    return [
        GenerationRequest(
            tuple(3 + (7 * i * (n // 2 + 1)) % (VOCABULARY - 3) for i in range(17 + 3 * (n // 2))),
            # greedy rows of one prompt are decoded with draft tokens
            Sampling(max_tokens=6 + n, temperature=float(n < 2)), n, n,
        )
        for n in range(count)
    ]  # fmt: skip


def decoded(engine: Engine, early: list[GenerationRequest], late: list[GenerationRequest]) -> Any:
    """The rows of both; the late ones are asked for after three steps."""
    rows = engine.add_requests(early)
    for _ in range(3):
        engine.step()
    rows += engine.add_requests(late)
    while engine.busy:
        engine.step()
    return rows


@pytest.mark.some(5)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_are_plain_transformers(family: str, adapter: bool) -> None:
    model = lora(family) if adapter else build(family)
    engine = Engine(model, eos_ids=frozenset(), context_limit=200)
    late = GenerationRequest(tuple(range(5, 30)), Sampling(max_tokens=5, temperature=1.0), 9, 9)
    first = decoded(engine, prompts(), [late])
    assert max(deviation(model, row) for row in first) < EXACT
    decoder = engine.decoder
    assert isinstance(decoder, ModuleDecoder if family in GENERAL else ContinuousDecoder)
    before = prefilled(decoder)
    again = [
        GenerationRequest((*r.request.ids, *r.ids, 9, 8, 7), Sampling(max_tokens=4), 3, r.request.owner)
        for r in first
    ]
    second = decoded(engine, again[:2], again[2:])
    assert max(deviation(model, row) for row in second) < EXACT
    # of an earlier turn, the last token alone was not in the cache
    assert engine.decoder is decoder
    assert prefilled(decoder) - before == 4 * len(again)

    batch = batch_of(samples_of(second))
    with torch.no_grad():
        ours = token_logprobs(model, batch)
        for (ids, mask, temperature), own in zip(rows_of(batch), ours, strict=True):
            plain = plain_logprobs(model, ids, temperature) * torch.tensor(mask[1 : len(ids)])
            torch.testing.assert_close(own[1 : len(ids)], plain, rtol=0, atol=EXACT)


def prefilled(decoder: ContinuousDecoder | ModuleDecoder | None) -> int:
    assert decoder is not None
    return decoder.num_prefilled if isinstance(decoder, ModuleDecoder) else decoder.counts.prefilled


def likelihood(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The loss of imitation: minus the sum of the log-probs."""
    return -token_logprobs(model, batch).sum(), {"tokens": float(batch.mask_BT.sum())}


def step(model: nn.Module, batch: Batch) -> None:
    learner = Learner(model, OptimizerConfig(learning_rate=1e-2), steps=1)
    learner.update([batch], likelihood, lambda metrics: None)


def fixed_batch() -> Batch:
    samples = [
        sample([3, *range(5, 25), n + 4, 7, 9, n], [0] * 21 + [1] * 4, n, 1.0 if n else 0.7) for n in range(3)
    ]
    return batch_of(samples)


@pytest.mark.some(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_step_has_the_gradient_of_plain_transformers_and_is_saved(family: str, tmp_path: Path) -> None:
    model, batch = build(family), fixed_batch()
    likelihood(model, batch)[0].backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for ids, mask, temperature in rows_of(batch):
        (-plain_logprobs(model, ids, temperature) * torch.tensor(mask[1:])).sum().backward()
    for name, parameter in model.named_parameters():
        if ours[name] is None:
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        assert parameter.grad is not None
        worst = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-4 * max(worst, 1.0))
    model.zero_grad()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, batch)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == []
    model.save_pretrained(tmp_path)
    attention = model.config._attn_implementation
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=attention).eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.some(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_step_moves_every_linear_layer_and_is_saved(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    base = build(family)
    linear = {
        name
        for name, part in base.named_modules()
        if (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
        and part is not base.get_output_embeddings()
        and "shared_expert" not in name  # which PEFT cannot name beside experts
    }
    experts = {
        name.rpartition(".")[0] for name, p in base.named_parameters() if "experts" in name and p.ndim == 3
    }
    model = prepare(base, lora_rank=2, seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    step(model, fixed_batch())
    adapted = {
        name.partition("base_model.model.")[2].partition(".lora_B")[0].replace(".base_layer", "")
        for name, p in model.named_parameters()
        if "lora_B" in name and not torch.equal(p, before[name])
    }
    assert adapted == linear | experts
    model.save_pretrained(str(tmp_path))
    loaded: Any = PeftModel.from_pretrained(build(family), str(tmp_path)).eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        # PEFT adds the products in another order
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_the_targets_are_found_in_the_model() -> None:
    assert lora_targets(build("phi3"))[0] == ["o_proj", "qkv_proj", "gate_up_proj", "down_proj"]
    assert lora_targets(build("mixtral")) == (
        ["q_proj", "k_proj", "v_proj", "o_proj"], ["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    assert "c_attn" in lora_targets(build("gpt2"))[0]


def test_a_fused_projection_of_a_state_space_gets_no_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT refuses it, in a sentence of its own behind twenty frames."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4,
        mamba_n_groups=1, mamba_chunk_size=8,
    )  # fmt: skip
    adapted = prepare(FalconH1ForCausalLM(config), lora_rank=2, seed=0)
    named = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert any("in_proj" in name for name in named)
    assert not any("out_proj" in name for name in named)
    assert "out_proj of falcon_h1 gets no adapter" in capsys.readouterr().err


def test_an_architecture_with_unknown_logits_is_refused_by_name() -> None:
    model = build("llama")
    plain = model.forward
    model.forward = lambda **inputs: doubled(plain(**inputs))
    with pytest.raises(ConfigError, match="architecture llama computes its logits in a way"):
        refuse_untrainable(model)


def doubled(out: Any) -> Any:
    out.logits = out.logits * 2
    return out


def test_a_model_without_a_head_is_refused_by_name() -> None:
    model = build("llama")
    with pytest.raises(ConfigError, match="architecture llama cannot be trained here"):
        refuse_untrainable(model.model)
