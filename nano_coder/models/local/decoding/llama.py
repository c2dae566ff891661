"""The forward pass of Llama-like models, on packed tokens, over parameters that live elsewhere.

Reads the module's own parameters: what is trained is what decodes. In place, with two exceptions, made once
for each version of the weights: the product of a low-rank adapter of PEFT is added to a copy of what it
adapts, and bfloat16 weights on a CPU are laid out for its matrix products. Rounds where the module rounds, so
that bfloat16 log-probs stay near those of the trainer. Left out: sliding windows, and rotary embeddings that
depend on the length of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 8
"""of the products that a layout is made for; it serves any other number as well"""


class Weights(NamedTuple):
    matrix: Tensor
    """[out, in]"""
    bias: Tensor | None


class Linear:
    """[N, in] -> [N, out]"""

    def __init__(self, weights: Weights) -> None:
        self.matrix, self._bias = weights
        self._packed = packs(self.matrix)
        if self._packed:
            self.matrix = torch.ops.mkldnn._reorder_linear_weight(self.matrix, _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self._bias, "none", [], "")
            return product
        return F.linear(x, self.matrix, self._bias)


class Joined:
    """Layers of one input, [N, in] -> [N, out] for each: one product where the weights are packed."""

    def __init__(self, parts: Sequence[Weights]) -> None:
        self._sizes = [part.matrix.shape[0] for part in parts]
        one = packs(parts[0].matrix) and len({part.bias is None for part in parts}) == 1
        self.layers = [Linear(part) for part in ([_joined(parts)] if one else parts)]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(self.layers) == 1:
            return torch.split(self.layers[0](x), self._sizes, dim=-1)
        return [layer(x) for layer in self.layers]


def packs(matrix: Tensor) -> bool:
    """Whether a layout of its own makes products with these weights quicker: bfloat16 on a CPU that has it.

    A step reads all weights for a few rows; of a plain matrix that takes half as long again. In float32 the
    layout wins nothing.
    """
    if matrix.device.type != "cpu" or matrix.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _joined(parts: Sequence[Weights]) -> Weights:
    biases = [part.bias for part in parts if part.bias is not None]
    return Weights(torch.cat([part.matrix for part in parts]), torch.cat(biases) if biases else None)


Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""layer, [N, H, D] queries, [N, K, D] keys and values, scale -> [N, H * D]; stores keys and values"""

_FAMILIES = ("llama", "qwen2", "qwen3")
_ROPE = ("default", "linear", "llama3", "yarn")
"""rotary embeddings that are a function of the position alone"""


class Unsupported(Exception):
    """This module is not one that we can decode by ourselves; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    before_attention: Norm
    queries_keys_values: Joined
    query_norm: Norm | None
    key_norm: Norm | None
    output: Linear
    before_mlp: Norm
    gate_up: Joined
    down: Linear


class LlamaForward:
    """N packed tokens through all layers; attention is the caller's."""

    def __init__(self, model: nn.Module) -> None:
        """Raises Unsupported."""
        causal, config = _causal_lm(model)
        body = causal.model
        self.heads = int(config.num_attention_heads)
        self.keys = int(config.num_key_value_heads)
        self.dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.layers = [_layer(layer, config) for layer in body.layers]
        self._embedding: Tensor = _embedding(body.embed_tokens)
        self._norm = _norm(body.norm)
        self._head = Linear(_weights(causal.lm_head))
        self._rotary: Any = body.rotary_emb

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def vocabulary(self) -> int:
        return self._embedding.shape[0]

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """[N, hidden] states after the last norm."""
        x = F.embedding(ids_N, self._embedding)
        cos, sin = (part[0][:, None] for part in self._rotary(x, position_ids=positions_N[None]))
        sin = torch.cat([-sin[..., : self.dim // 2], sin[..., self.dim // 2 :]], dim=-1)
        scale = self.dim**-0.5
        for index, layer in enumerate(self.layers):
            h = layer.before_attention(x)
            q, k, v = (part.view(len(h), -1, self.dim) for part in layer.queries_keys_values(h))
            if layer.query_norm is not None and layer.key_norm is not None:
                q, k = layer.query_norm(q), layer.key_norm(k)
            both = _rotate(torch.cat([q, k], dim=1), cos, sin)
            q, k = both[:, : self.heads], both[:, self.heads :]
            x = x + layer.output(attend(index, q, k, v, scale))
            gate, up = layer.gate_up(layer.before_mlp(x))
            x = x + layer.down(F.silu(gate).mul_(up))
        return self._norm(x)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V]"""
        return self._head(hidden_NH)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [N, heads, D], halves paired as in Hugging Face's layout.

    The first half of `sin` is negated: it is what the second half of `x` is multiplied by.
    """
    return (x * cos).add_(x.roll(x.shape[-1] // 2, dims=-1).mul_(sin))


def _causal_lm(model: Any) -> tuple[Any, Any]:
    if hasattr(model, "get_base_model"):
        if model.active_peft_config.is_prompt_learning:
            raise Unsupported("a prompt-learning adapter changes what attention sees")
        model = model.get_base_model()
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", type(model).__name__)
    if family not in _FAMILIES:
        raise Unsupported(f"{family} is not one of {', '.join(_FAMILIES)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE:
        raise Unsupported(f"its rotary embedding ({rope}) depends on more than the position")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise Unsupported("some of its layers attend to a window")
    if config.hidden_act != "silu":
        raise Unsupported(f"its activation is {config.hidden_act}")
    return model, config


def _layer(layer: Any, config: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = (attention.q_proj, attention.k_proj, attention.v_proj)
    normed = hasattr(attention, "q_norm")
    return Layer(
        before_attention=_norm(layer.input_layernorm),
        queries_keys_values=Joined([_weights(part) for part in inputs]),
        query_norm=_norm(attention.q_norm) if normed else None,
        key_norm=_norm(attention.k_norm) if normed else None,
        output=Linear(_weights(attention.o_proj)),
        before_mlp=_norm(layer.post_attention_layernorm),
        gate_up=Joined([_weights(mlp.gate_proj), _weights(mlp.up_proj)]),
        down=Linear(_weights(mlp.down_proj)),
    )


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))


def _embedding(module: Any) -> Tensor:
    if type(module) is not nn.Embedding:
        raise Unsupported(f"its embedding is a {type(module).__name__}")
    return module.weight.detach()


def _weights(module: Any) -> Weights:
    """Of the layer itself, or a copy with its adapter merged in. Raises Unsupported for any other kind."""
    if type(module) is nn.Linear:
        return Weights(module.weight.detach(), None if module.bias is None else module.bias.detach())
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "get_delta_weight"):
        raise Unsupported(f"one of its linear layers is a {type(module).__name__}")
    adapters = [name for name in module.active_adapters if name in module.lora_A]
    if any(getattr(module, "lora_variant", {}).get(name) for name in adapters) or any(
        module.lora_B[name].bias is not None for name in adapters
    ):
        raise Unsupported("its adapter is more than a low-rank product")
    plain = _weights(base)
    if module.merged or module.disable_adapters or not adapters:
        return plain
    if len(adapters) == 1 and not getattr(module, "fan_in_fan_out", False):
        return Weights(_merged(plain.matrix, module, adapters[0]), plain.bias)
    # summed in the adapters' float32 and rounded once
    weight = plain.matrix.float()
    for name in adapters:
        weight = weight + module.get_delta_weight(name).detach().float()
    return Weights(weight.to(plain.matrix.dtype), plain.bias)


def _merged(matrix: Tensor, module: Any, name: str) -> Tensor:
    """With the product of one adapter, added and rounded once within the product, as the trainer does: a
    sum in float32 would be four more passes over memory twice as large, each time that the weights change."""
    up, down = (part[name].weight.detach().to(matrix.dtype) for part in (module.lora_B, module.lora_A))
    return torch.addmm(matrix, up, down, alpha=float(module.scaling[name]))
