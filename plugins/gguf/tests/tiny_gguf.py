"""A tiny GGUF file: the weights and the tokenizer of a folder, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_gguf(
    folder: Path, file: Path, *, template: str | None, architecture: str = "llama", gain: float = 1.0
) -> Path:
    """A Llama's folder as a GGUF file; matrices times `gain`."""
    import torch
    from gguf import GGUFWriter, TokenType
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), model.config
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = sorted(bpe["vocab"], key=bpe["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads := config.num_attention_heads)
    writer.add_head_count_kv(keys := config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([TokenType.CONTROL if t in special else TokenType.NORMAL for t in vocabulary])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if template is not None:
        writer.add_chat_template(template)

    def rotated(weight: torch.Tensor, count: int) -> torch.Tensor:
        """In llama.cpp's order of what the position rotates."""
        return weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        told = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            inner = rest.removesuffix(".weight")
            told[name] = f"blk.{layer}.{names[inner]}.weight"
            counts = {"self_attn.q_proj": heads, "self_attn.k_proj": keys}
            weight = rotated(weight, counts[inner]) if inner in counts else weight
        if name in told:
            writer.add_tensor(told[name], (weight * (gain if weight.ndim == 2 else 1)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
