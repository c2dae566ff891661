"""Our forward pass is the module's own, for each family, dtype and adapter; else the module's is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nano_coder.models.local.continuous_batching import ContinuousDecoder
from nano_coder.models.local.engine import Engine, ModuleDecoder
from nano_coder.models.local.llama import GatedMLP
from nano_coder.models.local.sampler import GenerationRequest
from nano_shared.types import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # a nearly flat distribution would hide mistakes
}


def build(family: str, **options: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def adapted(model: Any, **options: Any) -> Any:
    """With an adapter whose product is not zero."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets, **options))
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return peft


def engine_of(model: Any) -> Engine:
    return Engine(model, eos_ids=frozenset(), context_limit=200)


def deviation(engine: Engine, *, temperature: float = 0.8) -> float:
    """Largest difference of sampled and teacher-forced log-probs over two turns of two groups."""
    first = [
        GenerationRequest(
            tuple(range(1 + i // 2, 30 + i // 2)), Sampling(max_tokens=8, temperature=temperature), i, i
        )
        for i in range(4)
    ]
    second = [
        GenerationRequest((*r.ids, *s.ids, 9, 8, 7), r.sampling, r.seed, r.owner)
        for r, s in zip(first, engine.generate(first), strict=True)
    ]
    worst = 0.0
    for request, sampled in zip(second, engine.generate(second), strict=True):
        scores = engine.score([request.ids + sampled.ids], temperature)[0][len(request.ids) - 1 :]
        worst = max(worst, *(abs(a - b) for a, b in zip(scores, sampled.logprobs, strict=True)))
    return worst


FAMILIES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("Llama", {"num_key_value_heads": 4}),
    "llama 3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen2, a window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_exact(name: str) -> None:
    family, options = FAMILIES[name]
    engine = engine_of(build(family, **options))
    assert deviation(engine) < 1e-4
    assert isinstance(engine.decoder, ContinuousDecoder)


def test_bfloat16_stays_as_near_as_the_module_does_to_itself() -> None:
    model = build("Llama", initializer_range=0.05).bfloat16()
    engine = engine_of(model)
    assert deviation(engine) < 0.1
    assert isinstance(engine.decoder, ContinuousDecoder)


def test_an_adapter_decodes_as_it_trains() -> None:
    engine = engine_of(adapted(build("Qwen2")))
    assert deviation(engine) < 1e-4
    assert isinstance(engine.decoder, ContinuousDecoder)


def test_an_adapter_that_learns_is_read_anew() -> None:
    model = adapted(build("Llama"))
    engine = engine_of(model)
    assert deviation(engine) < 1e-4
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.mul_(-2)
    assert deviation(engine) < 1e-4


def test_a_layer_that_was_trained_whole_beside_an_adapter_is_read() -> None:
    model = adapted(build("Llama"), modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(-1)
    engine = engine_of(model)
    assert deviation(engine) < 1e-4
    assert isinstance(engine.decoder, ContinuousDecoder)


def test_an_adapter_that_is_off_is_not_read() -> None:
    model = adapted(build("Llama"))
    with model.disable_adapter():
        engine = engine_of(model)
        assert deviation(engine) < 1e-4
        assert isinstance(engine.decoder, ContinuousDecoder)


def test_full_weights_are_read_in_place_where_packing_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    model = build("Llama")
    engine = engine_of(model)
    engine.generate([GenerationRequest((1, 2, 3), Sampling(max_tokens=2), 0)])
    assert isinstance(engine.decoder, ContinuousDecoder)
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    for layer in engine.decoder._forward.layers:
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLP)
        assert {part.matrix.data_ptr() for part in (*mlp.gate_up.layers, mlp.down)} <= addresses


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build("GPTNeoX", num_key_value_heads=None), "no forward pass of ours for gpt_neox"),
        (
            lambda: build(
                "Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "depends on more than the position",
        ),
        (lambda: adapted(build("Llama"), use_dora=True), "more than a low-rank product"),
    ],
    ids=["family", "rope", "dora"],
)
def test_other_models_decode_through_their_own_forward_and_say_so_once(
    make: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make()
    assert deviation(engine_of(model)) < 1e-4
    assert reason in capsys.readouterr().err
    engine = engine_of(model)
    engine.generate([GenerationRequest((1, 2, 3), Sampling(max_tokens=2), 0)])
    assert isinstance(engine.decoder, ModuleDecoder)
    assert capsys.readouterr().err == ""
