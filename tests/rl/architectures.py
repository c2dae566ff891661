"""A tiny random model of every family that nano names, built from its configuration, without a download."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WINDOW = 12
"""shorter than the rows of the tests"""
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 4.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3", {"sliding_window": None}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "gpt-oss": (
        "GptOss",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
         "attention_multiplier": 0.2},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**_EXPERTS, "shared_expert_intermediate_size": 24,
         "layer_types": ["linear_attention", "full_attention"],
         "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "initializer_range": 0.1},
    ),
    "gpt2": ("GPT2", _GPT),
    "gpt-neox": ("GPTNeoX", {}),
}  # fmt: skip
"""family -> its class in transformers, and what its configuration has beside the shape"""


def build(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """The same weights at every call."""
    import transformers

    name, own = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    shape = {} if name == "GPT2" else _SHAPE
    config = config_class(**{**shape, **own, **settings})
    if family == "gemma2":  # SDPA does not cap its scores
        config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that are ones and zeros would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).eval()
