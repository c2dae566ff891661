"""The forward pass of Llama-like models on packed tokens, over the parameters of a live module.

It reads the module's own parameters, so weights that are trained are decoded with. Two exceptions are copied
once for each version of the weights: layers with a low-rank PEFT adapter, merged, and bfloat16 weights on a
CPU, packed for its matrix products. It rounds where the module rounds, so that bfloat16 log-probs stay close
to the trainer's. Not supported: sliding windows, and rotary embeddings that depend on the row's length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 8
"""number of rows that packed weights are optimised for; any number works"""


class LlamaWeights(NamedTuple):
    matrix: Tensor
    """[out, in]"""
    bias: Tensor | None


class Linear:
    """A linear layer, [N, in] -> [N, out]."""

    def __init__(self, weights: LlamaWeights) -> None:
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
    """Several linear layers of one input, [N, in] -> [N, out] each; one product if the weights are packed."""

    def __init__(self, parts: Sequence[LlamaWeights]) -> None:
        self._sizes = [part.matrix.shape[0] for part in parts]
        one = packs(parts[0].matrix) and len({part.bias is None for part in parts}) == 1
        self.layers = [Linear(part) for part in ([_joined(parts)] if one else parts)]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(self.layers) == 1:
            return torch.split(self.layers[0](x), self._sizes, dim=-1)
        return [layer(x) for layer in self.layers]


def packs(matrix: Tensor) -> bool:
    """Whether packing makes products with these weights faster: bfloat16 on a CPU with instructions for it.

    A step reads all weights for a few rows; with plain matrices that takes half as long again. In float32,
    packing gains nothing.
    """
    if matrix.device.type != "cpu" or matrix.dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _joined(parts: Sequence[LlamaWeights]) -> LlamaWeights:
    biases = [part.bias for part in parts if part.bias is not None]
    return LlamaWeights(torch.cat([part.matrix for part in parts]), torch.cat(biases) if biases else None)


Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, [N, H, D] queries, [N, K, D] keys, [N, K, D] values, scale) -> [N, H * D]; stores keys and
values"""

_FAMILIES = ("llama", "qwen2", "qwen3")
_ROPE = ("default", "linear", "llama3", "yarn")
"""kinds of rotary embeddings that depend on the position only"""


class Unsupported(Exception):
    """The module cannot be decoded by LlamaForward; the message says why."""


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
    """N packed tokens through all layers; the caller supplies attention."""

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
        """[N, V] logits."""
        return self._head(hidden_NH)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [N, heads, D], with the halves paired as in Hugging Face's layout.

    The first half of `sin` is negated, since it multiplies the second half of `x`.
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


def _weights(module: Any) -> LlamaWeights:
    """The layer's weights, or a copy with its adapter merged in. Raises Unsupported for any other kind of
    layer."""
    if type(module) is nn.Linear:
        return LlamaWeights(module.weight.detach(), None if module.bias is None else module.bias.detach())
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
        return LlamaWeights(_merged(plain.matrix, module, adapters[0]), plain.bias)
    # summed in the adapters' float32 and rounded once
    weight = plain.matrix.float()
    for name in adapters:
        weight = weight + module.get_delta_weight(name).detach().float()
    return LlamaWeights(weight.to(plain.matrix.dtype), plain.bias)


def _merged(matrix: Tensor, module: Any, name: str) -> Tensor:
    """The matrix with the product of one adapter added. Rounds once, inside the product, as the trainer does:
    a float32 sum would take four more passes over twice the memory at each change of the weights."""
    up, down = (part[name].weight.detach().to(matrix.dtype) for part in (module.lora_B, module.lora_A))
    return torch.addmm(matrix, up, down, alpha=float(module.scaling[name]))
