"""The forward pass of decoder-only models on packed tokens, over the parameters of a live module.

Llama and the families that differ from it in the place of norms, in windows, caps, scales, rotary embeddings
or feed-forward layers (`_FAMILIES`). What differs is read from the module; norms, rotary embeddings and
experts that are computed in another way than Llama's are the module's own.

It reads the module's own parameters, so weights that are trained are decoded with. Two exceptions are copied
once for each version of the weights: layers with a low-rank PEFT adapter, side by side with it, unless they
are float32; and weights that a CPU multiplies faster when they are packed. It rounds where the module rounds,
so that bfloat16 log-probs stay close to the trainer's; adapters are never merged, since rounding would lose
what is small beside a weight. Not supported: rotary embeddings that depend on the row's length, linear
attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nano_coder.models.local.attention import Scoring
from nano_shared.lora import LowRank, adapter_of

_ROWS = 8
"""number of rows that packed weights are optimised for; any number works"""
_COPIED = 1 << 30
"""bytes of float32 weights up to which a second copy of them is worth its memory"""


class LlamaWeights(NamedTuple):
    matrix: Tensor
    """[out, in]"""
    bias: Tensor | None
    adapter: LowRank | None = None


class Linear:
    """A linear layer, [N, in] -> [N, out].

    An adapter's second product is part of the layer's own: `[W, s B] [x; A x]`. It is summed as W's is, and
    the sum is rounded once. In float32, where rounding loses nothing of it, it is added, and W not copied.
    """

    def __init__(self, weights: LlamaWeights, *, small: bool = False) -> None:
        self.matrix, self._bias, adapter = weights
        self._packed = packs(self.matrix, small=small)
        self._down: Linear | None = None
        self._up: Tensor | None = None
        if adapter is not None:
            up = (adapter.up * adapter.scaling).to(self.matrix.dtype)
            self._down = Linear(LlamaWeights(adapter.down.to(self.matrix.dtype), None))
            if self._packed or _stands_beside(self.matrix):
                self.matrix = torch.cat([self.matrix, up], dim=1)
            else:
                self._up = up.T
        if self._packed:
            self.matrix = torch.ops.mkldnn._reorder_linear_weight(self.matrix, _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self._down is not None and self._up is not None:
            return torch.addmm(F.linear(x, self.matrix, self._bias), self._down(x), self._up)
        if self._down is not None:
            x = torch.cat([x, self._down(x)], dim=-1)
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, self._bias, "none", [], "")
            return product
        return F.linear(x, self.matrix, self._bias)


class Joined:
    """Several linear layers of one input, [N, in] -> [N, out] each; one product if their weights are copied,
    as they are to be packed, or to stand beside an adapter."""

    def __init__(
        self, parts: Sequence[LlamaWeights], sizes: Sequence[int] | None = None, *, small: bool = False
    ) -> None:
        """`sizes`: those of the outputs, where one layer holds several."""
        self._sizes = [part.matrix.shape[0] for part in parts] if sizes is None else list(sizes)
        matrix = parts[0].matrix
        copied = packs(matrix, small=small) or (
            _stands_beside(matrix) and any(part.adapter for part in parts)
        )
        one = copied and len({part.bias is None for part in parts}) == 1
        self.layers = [Linear(part, small=small) for part in ([_joined(parts)] if one else parts)]

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if len(self.layers) == 1:
            return torch.split(self.layers[0](x), self._sizes, dim=-1)
        return [layer(x) for layer in self.layers]


def packs(matrix: Tensor, *, small: bool) -> bool:
    """Whether packing makes products with these weights faster: bfloat16 on a CPU with instructions for it,
    and float32, of a model that is `small`, on one with AVX2 and not AVX-512.

    A step reads all weights for a few rows; with plain matrices that takes half as long again, and twice as
    long with AVX2. With AVX-512, packing gains nothing in float32.
    """
    if matrix.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if matrix.dtype == torch.float32:
        return small and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return matrix.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _stands_beside(matrix: Tensor) -> bool:
    """Whether an adapter is made part of the product with this matrix."""
    return matrix.dtype != torch.float32


def _joined(parts: Sequence[LlamaWeights]) -> LlamaWeights:
    """One layer, whose adapter is that of all: the first matrices one above the other, the second on the
    diagonal."""
    biases = [part.bias for part in parts if part.bias is not None]
    matrix = torch.cat([part.matrix for part in parts])
    adapter = None
    if any(part.adapter for part in parts):
        each = [part.adapter or _nothing(part.matrix) for part in parts]
        ups = torch.block_diag(*(one.up * one.scaling for one in each))  # type: ignore[no-untyped-call]
        adapter = LowRank(torch.cat([one.down for one in each]), ups, 1.0)
    return LlamaWeights(matrix, torch.cat(biases) if biases else None, adapter)


def _nothing(matrix: Tensor) -> LowRank:
    """The adapter of rank 0 of a layer that has none."""
    return LowRank(matrix.new_empty(0, matrix.shape[1]), matrix.new_empty(matrix.shape[0], 0), 1.0)


Attend = Callable[[int, Tensor, Tensor, Tensor, Scoring], Tensor]
"""(layer, [N, H, D] queries, [N, K, D] keys, [N, K, D] values, scores) -> [N, H * D]; stores keys and
values"""
Apply = Callable[[Tensor], Tensor]
Several = Callable[[Tensor], Sequence[Tensor]]


class Norms(NamedTuple):
    """Names of a layer's norms; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


_LLAMA = Norms("input_layernorm", None, "post_attention_layernorm", None)
_GEMMA = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GLM = Norms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_OLMO = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_PARALLEL = Norms("input_layernorm", None, None, None)
"""feed-forward and attention read the same normed states"""
_FAMILIES = {
    "llama": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA, "mistral": _LLAMA, "granite": _LLAMA,
    "smollm3": _LLAMA, "phi3": _LLAMA, "mixtral": _LLAMA, "qwen3_moe": _LLAMA, "gpt_oss": _LLAMA,
    "gemma2": _GEMMA, "gemma3_text": _GEMMA, "glm4": _GLM, "olmo2": _OLMO, "cohere": _PARALLEL,
}  # fmt: skip
_OWN_NORM = ("gemma2", "gemma3_text", "olmo2", "cohere", "gpt_oss")
"""families whose norm is not `weight * normed`, or rounds elsewhere"""
_OWN_ROTATION = ("phi3", "glm4", "olmo2", "cohere", "gpt_oss")
"""families whose rotary embedding is partial, interleaved, or rounds elsewhere"""
_ROPE = ("default", "linear", "llama3", "yarn")
"""kinds of rotary embeddings that depend on the position only"""
_LAYERS = {"full_attention", "sliding_attention"}


class Unsupported(Exception):
    """The module cannot be decoded by LlamaForward; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # one kernel in place of seven; rounds once, and so does the trainer's
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    gate_up: Several
    down: Apply
    activation: Apply | None
    """None: SiLU"""

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        gate = F.silu(gate) if self.activation is None else self.activation(gate)
        return self.down(gate.mul_(up))


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    norms: tuple[Apply | None, Apply | None, Apply | None, Apply | None]
    """as in `Norms`"""
    queries_keys_values: Several
    query_norm: Apply | None
    key_norm: Apply | None
    norms_flat: bool
    """whether query and key norm see all heads as one vector"""
    output: Apply
    mlp: Apply
    scores: Scoring
    rotary: str | None
    """kind of its rotary embedding; None: none"""


class LlamaForward:
    """N packed tokens through all layers; the caller supplies attention."""

    def __init__(self, model: nn.Module) -> None:
        """Raises Unsupported."""
        causal, config = _causal_lm(model)
        body = causal.model
        self.heads = int(config.num_attention_heads)
        self.keys = int(config.num_key_value_heads)
        self.dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self._rotary: Any = body.rotary_emb
        self._typed = "layer_type" in signature(self._rotary.forward).parameters
        small = sum(each.numel() * each.itemsize for each in model.parameters()) <= _COPIED
        self.layers = [_layer(layer, config, self.heads, self.keys, self.dim, small) for layer in body.layers]
        self._embed: Any = body.embed_tokens
        self._norm = _norm(body.norm, config)
        self._head = Linear(_weights(causal.lm_head), small=small)
        self._rotary_kinds = [kind for kind in dict.fromkeys(one.rotary for one in self.layers) if kind]
        own = config.model_type in _OWN_ROTATION
        self._rotate_pair: Any = sys.modules[type(body).__module__].apply_rotary_pos_emb if own else None
        self.windows = {layer.scores.window for layer in self.layers if layer.scores.window is not None}
        """sizes of the windows that layers attend to"""
        self._parallel = _FAMILIES[config.model_type] is _PARALLEL
        self._embedding_scale = float(getattr(config, "embedding_multiplier", 1.0))
        self._residual_scale = float(getattr(config, "residual_multiplier", 1.0))
        self._logit_scale = float(getattr(config, "logit_scale", 1.0)) / float(
            getattr(config, "logits_scaling", 1.0)
        )
        self._logit_cap = getattr(config, "final_logit_softcapping", None)
        self.fixed_shapes = not self.windows and all(isinstance(one.mlp, GatedMLP) for one in self.layers)
        """whether all shapes depend on the number of tokens alone, which those of experts do not"""

    @property
    def dtype(self) -> torch.dtype:
        return self._embed.weight.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self._embed.weight.device  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        return int(self._embed.weight.shape[0])

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """[N, hidden] states after the last norm."""
        x: Tensor = self._embed(ids_N)
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        angles = {kind: self._angles(x, positions_N, kind) for kind in self._rotary_kinds}
        for index, layer in enumerate(self.layers):
            before_attention, after_attention, before_mlp, after_mlp = layer.norms
            h = x if before_attention is None else before_attention(x)
            q, k, v = self._project(layer, h)
            if layer.rotary is not None:
                q, k = self._rotated(q, k, *angles[layer.rotary])
            mixed = layer.output(attend(index, q, k, v, layer.scores))
            if after_attention is not None:
                mixed = after_attention(mixed)
            if self._parallel:
                x = x + mixed + layer.mlp(h)
                continue
            x = x + self._residual(mixed)
            new = layer.mlp(x if before_mlp is None else before_mlp(x))
            x = x + self._residual(new if after_mlp is None else after_mlp(new))
        return self._norm(x)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] logits."""
        logits_NV = self._head(hidden_NH)
        if self._logit_scale != 1:
            logits_NV = logits_NV * self._logit_scale
        if self._logit_cap:
            logits_NV = (logits_NV / self._logit_cap).tanh() * self._logit_cap
        return logits_NV

    def _project(self, layer: Layer, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[N, H, D] queries, [N, K, D] keys and values, normed."""
        q, k, v = layer.queries_keys_values(h)
        if layer.norms_flat and layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        q, k, v = (part.view(len(h), -1, self.dim) for part in (q, k, v))
        if not layer.norms_flat and layer.query_norm is not None and layer.key_norm is not None:
            q, k = layer.query_norm(q), layer.key_norm(k)
        return q, k, v

    def _angles(self, x: Tensor, positions_N: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines as the rotation reads them."""
        more = {"layer_type": kind} if self._typed else {}
        cos, sin = self._rotary(x, position_ids=positions_N[None], **more)
        if self._rotate_pair is not None:
            return cos, sin
        cos, sin = cos[0][:, None], sin[0][:, None]
        return cos, torch.cat([-sin[..., : self.dim // 2], sin[..., self.dim // 2 :]], dim=-1)

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self._rotate_pair is not None:
            both = self._rotate_pair(q[None], k[None], cos, sin, unsqueeze_dim=2)
            return both[0][0], both[1][0]
        joined = _rotate(torch.cat([q, k], dim=1), cos, sin)
        return joined[:, : self.heads], joined[:, self.heads :]

    def _residual(self, x: Tensor) -> Tensor:
        return x if self._residual_scale == 1 else x * self._residual_scale


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
        raise Unsupported(f"there is no forward pass of ours for {family}")
    ropes = getattr(config, "rope_parameters", None) or {}
    # one for all layers, or one for each kind of layer
    for rope in [ropes] if "rope_type" in ropes else ropes.values():
        if isinstance(rope, dict) and rope.get("rope_type", "default") not in _ROPE:
            raise Unsupported(f"its rotary embedding ({rope['rope_type']}) depends on more than the position")
    other = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if other:
        raise Unsupported(f"it has layers of {', '.join(sorted(other))}")
    return model, config


def _layer(layer: Any, config: Any, heads: int, keys: int, dim: int, small: bool) -> Layer:
    attention = layer.self_attn
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    if hasattr(attention, "qkv_proj"):
        sizes = (heads * dim, keys * dim, keys * dim)
        projections = _several([attention.qkv_proj], sizes, small=small)
    else:
        projections = _several([getattr(attention, f"{name}_proj") for name in "qkv"], small=small)
    rotary = getattr(attention, "layer_type", None) or "default"
    names = _FAMILIES[config.model_type]
    before, after, before_mlp, after_mlp = (
        None if name is None else _norm(getattr(layer, name), config) for name in names
    )
    return Layer(
        norms=(before, after, before_mlp, after_mlp),
        queries_keys_values=projections,
        query_norm=None if query_norm is None else _norm(query_norm, config),
        key_norm=None if key_norm is None else _norm(key_norm, config),
        norms_flat=query_norm is not None and query_norm.weight.numel() == heads * dim != dim
        and query_norm.weight.ndim == 1,
        output=_one(attention.o_proj, small=small),
        mlp=_mlp(layer.mlp, small=small),
        scores=_scores(attention, config),
        rotary=rotary if getattr(attention, "use_rope", True) else None,
    )  # fmt: skip


def _scores(attention: Any, config: Any) -> Scoring:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    sinks = getattr(attention, "sinks", None)
    # transformers does not cap the scores under SDPA
    capped = getattr(config, "_attn_implementation", None) != "sdpa"
    return Scoring(
        scale=float(attention.scaling),
        window=getattr(attention, "sliding_window", window),
        softcap=getattr(attention, "attn_logit_softcapping", None) if capped else None,
        sinks_H=None if sinks is None else sinks.detach(),
    )


def _mlp(module: Any, *, small: bool) -> Apply:
    """Our own if it is `down(act(gate(x)) * up(x))`; else the module, as for experts."""
    activation: Any = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    parts = {name for name, _ in module.named_children()} - {"act_fn", "activation_fn"}
    own = None if type(activation).__name__ in ("SiLU", "SiLUActivation") else activation
    if parts == {"gate_proj", "up_proj", "down_proj"}:
        gate_up = _several([module.gate_proj, module.up_proj], small=small)
    elif parts == {"gate_up_proj", "down_proj"}:
        sizes = [module.gate_up_proj.out_features // 2] * 2
        gate_up = _several([module.gate_up_proj], sizes, small=small)
    else:

        def experts(x: Tensor) -> Tensor:
            out = module(x[None])
            states: Tensor = out[0] if isinstance(out, tuple) else out
            return states.view(x.shape)

        return experts
    return GatedMLP(gate_up, _one(module.down_proj, small=small), own)


def _one(module: Any, *, small: bool) -> Apply:
    """A linear layer; a quantised one is called as it is."""
    if not _quantised(module):
        return Linear(_weights(module), small=small)
    apply: Apply = module
    return apply


def _several(modules: Sequence[Any], sizes: Sequence[int] | None = None, *, small: bool) -> Several:
    if not any(map(_quantised, modules)):
        return Joined([_weights(module) for module in modules], sizes, small=small)

    def called(x: Tensor) -> Sequence[Tensor]:
        outputs = [module(x) for module in modules]
        return outputs if sizes is None else torch.split(outputs[0], list(sizes), dim=-1)

    return called


def _quantised(module: Any) -> bool:
    kinds = type(getattr(module, "base_layer", module)).__mro__
    return any(kind.__module__.startswith("bitsandbytes") for kind in kinds)


def _norm(module: Any, config: Any) -> Apply:
    if config.model_type in _OWN_NORM:
        apply: Apply = module
        return apply
    return Norm(module.weight.detach(), float(module.variance_epsilon))


def _weights(module: Any) -> LlamaWeights:
    """The layer's weights, and its adapter. Raises Unsupported for any other kind of layer."""
    if hasattr(module, "modules_to_save"):  # a layer that was trained whole beside an adapter
        whole = not module.disable_adapters and module.modules_to_save
        return _weights(whole[module.active_adapters[0]] if whole else module.original_module)
    if type(module) is nn.Linear:
        return LlamaWeights(module.weight.detach(), None if module.bias is None else module.bias.detach())
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A"):
        raise Unsupported(f"one of its linear layers is a {type(module).__name__}")
    plain, adapter = _weights(base), adapter_of(module)
    if adapter is not None:
        down, up, scaling = adapter
        return plain._replace(adapter=LowRank(down.detach(), up.detach(), scaling))
    if (
        not module.merged
        and not module.disable_adapters
        and any(n in module.lora_A for n in module.active_adapters)
    ):
        raise Unsupported("its adapter is more than a low-rank product")
    return plain
