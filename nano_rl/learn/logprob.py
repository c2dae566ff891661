"""Log-probs of the trained tokens under a causal LM, with shared prefixes computed once.

A site is a hidden state at which one or several trained tokens are predicted; the head runs over chunks of
sites, whose logits are freed and computed again in the backward pass. Values and gradients equal those of
independent rows.

Whether a model gives the same values along a tree as on plain rows is tested once, on first use. The
low-memory layers have the model's formulas: a norm keeps its input and one number per row, a gated unit the
two factors of its product. Only modules with a known formula are replaced: RMSNorm with `variance_epsilon`
(others add 1 to the weight), and `down(silu(gate(x)) * up(x))`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nano_rl.learn.batch import Batch
from nano_rl.learn.prefix_tree import ATTENTION_NAME, TokenTree, TreeUnsupported, build_tree, register
from nano_shared.errors import ConfigError
from nano_shared.process import unmap_freed_memory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    logprobs_BT: Tensor
    """at least float32, nats at the row's temperature; 0 where the mask is False"""
    entropy_BT: Tensor
    """entropy of the distribution at each trained token, nats; 0 elsewhere; with gradient only on request"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """N tokens to score at S sites, ordered by site."""

    site_N: Tensor
    """int64 index of each token's site, ascending"""
    ids_N: Tensor
    temperature_S: Tensor
    softcap: float | None = None
    """logits x become softcap * tanh(x / softcap), before the temperature"""


def token_logprobs(model: nn.Module, batch: Batch, *, chunk_tokens: int | None = None) -> Tensor:
    """[B, T] log-probs of `ids_BT` where `mask_BT` is True, 0 elsewhere; float32 (float64 stays). Logits are
    divided by the row's temperature, as in sampling. Dropout is off, so that passes are comparable. Raises
    ConfigError for a model whose logits are computed in a way that is not known here."""
    return score_tokens(model, batch, chunk_tokens=chunk_tokens, entropy=False).logprobs_BT


def can_share(model: nn.Module) -> bool:
    """True if rows with shared prefixes are merged for this model; otherwise a warning says why not."""
    with dropout_off(model):
        return shares_prefixes(_causal_lm(model))


@contextmanager
def plain_rows(model: nn.Module) -> Iterator[None]:
    """Temporarily run independent rows by the model's own forward pass, without merging prefixes."""
    causal = _causal_lm(model)
    with dropout_off(model), independent_rows(causal):
        yield


def score_tokens(
    model: nn.Module, batch: Batch, *, chunk_tokens: int | None = None, entropy: bool = True,
    entropy_gradient: bool = False,
) -> TokenScores:  # fmt: skip
    """As `token_logprobs`, with entropies from the same logits."""
    causal = _causal_lm(model)
    batch = batch.to(next(causal.parameters()).device)
    rows_N, positions_N = batch.mask_BT.nonzero(as_tuple=True)
    with dropout_off(model):
        states_MH, node_BT = row_states(causal, batch.ids_BT, batch.attention_BT)
        # a token is predicted by the state before it, at the temperature of its row
        temperatures, kind_B = batch.temperature_B.unique(return_inverse=True)
        key_N = node_BT[rows_N, positions_N - 1] * len(temperatures) + kind_B[rows_N]
        key_N, order_N = key_N.sort(stable=True)
        rows_N, positions_N = rows_N[order_N], positions_N[order_N]
        sites_S, site_N = key_N.unique_consecutive(return_inverse=True)
        logprobs_N, entropy_N = selected_scores(
            causal.get_output_embeddings(),
            states_MH[sites_S // len(temperatures)],
            Targets(
                site_N=site_N,
                ids_N=batch.ids_BT[rows_N, positions_N],
                temperature_S=temperatures[sites_S % len(temperatures)] / _logit_scale(causal.config),
                softcap=getattr(causal.config, "final_logit_softcapping", None),
            ),
            chunk_tokens=chunk_tokens,
            entropy=entropy,
            entropy_gradient=entropy_gradient,
        )
    place = rows_N, positions_N

    def scatter(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(batch.mask_BT.shape).index_put(place, values_N)

    return TokenScores(logprobs_BT=scatter(logprobs_N), entropy_BT=scatter(entropy_N))


CHUNK_LOGITS = 2**26
"""number of logits that exist at once, in the weights' precision"""
BLOCK_LOGITS, GPU_BLOCK_LOGITS = 2**20, 2**26
"""number of logits that are processed at once in float32: those that stay in a CPU's caches; off the CPU each
block costs some thirty launches"""


def block_logits(device: torch.device) -> int:
    return BLOCK_LOGITS if device.type == "cpu" else GPU_BLOCK_LOGITS


def selected_scores(
    head: nn.Module, hidden_SH: Tensor, targets: Targets, *, chunk_tokens: int | None = None,
    entropy: bool = True, entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[N] log-probs and [N] entropies, nats, at least float32. A head that is not a plain linear layer (with
    an adapter or hooks) is called as a module."""
    if hidden_SH.shape[0] == 0:
        # keep the graph, so that a batch without trained tokens has a gradient of zero
        nothing = hidden_SH.sum(dim=1).to(torch.promote_types(hidden_SH.dtype, torch.float32))
        return nothing, nothing.detach()
    vocabulary = getattr(head, "out_features", 2**15)
    size = chunk_tokens or max(1, CHUNK_LOGITS // vocabulary)
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return _of_module(head, hidden_SH, targets, size, entropy_gradient)
    apply: Callable[..., tuple[Tensor, Tensor]] = _SelectedScores.apply
    logprobs_N, entropy_N = apply(
        hidden_SH, head.weight, head.bias, targets, size,
        "gradient" if entropy_gradient else "value" if entropy else "none",
    )  # fmt: skip
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


def _chunks(targets: Targets, sites: slice, size: int) -> Iterator[tuple[slice, slice]]:
    starts = [*range(sites.start, sites.stop, size), sites.stop]
    bounds = torch.searchsorted(targets.site_N, torch.tensor(starts, device=targets.site_N.device)).tolist()
    for i, (start, end) in enumerate(pairwise(starts)):
        yield slice(start, end), slice(bounds[i], bounds[i + 1])


def _log_softmax(logits_sV: Tensor, temperature_s1: Tensor, softcap: float | None) -> tuple[Tensor, Any]:
    """Log-probs in the dtype of the temperatures, and the derivative of the cap by each logit, if there is
    one."""
    logs_sV, slope_sV = logits_sV.to(temperature_s1.dtype), None
    if softcap:
        logs_sV = (logs_sV / softcap).tanh()
        slope_sV = 1 - logs_sV.square()
        logs_sV = logs_sV * softcap
    if bool((temperature_s1 != 1).any()):
        logs_sV = logs_sV / temperature_s1
    return logs_sV.log_softmax(dim=-1), slope_sV


class _SelectedScores(torch.autograd.Function):
    """The logits of a chunk are one matrix product in the weights' precision. Softmax and derivative are
    computed in blocks of rows that fit into the caches; the derivative overwrites the logits in place."""

    @staticmethod
    def forward(
        ctx: Any, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets: Targets, size: int,
        entropy: Literal["none", "value", "gradient"],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V)
        ctx.targets, ctx.size, ctx.entropy_gradient = targets, size, entropy == "gradient"
        wide = torch.promote_types(hidden_SH.dtype, torch.float32)
        logprobs_N = hidden_SH.new_zeros(targets.ids_N.shape, dtype=wide)
        entropy_N = torch.zeros_like(logprobs_N)
        rows = max(1, block_logits(hidden_SH.device) // weight_VH.shape[0])
        for sites, _ in _chunks(targets, slice(0, len(hidden_SH)), size):
            logits_sV = nn.functional.linear(hidden_SH[sites], weight_VH, bias_V)
            for at, own in _chunks(targets, sites, rows):
                block = logits_sV[at.start - sites.start : at.stop - sites.start]
                logs_sV, _ = _log_softmax(block, targets.temperature_S[at, None].to(wide), targets.softcap)
                local_n = targets.site_N[own] - at.start
                logprobs_N[own] = logs_sV[local_n, targets.ids_N[own]]
                if entropy != "none":
                    entropy_N[own] = -torch.linalg.vecdot(logs_sV.exp(), logs_sV)[local_n]
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, by_logprob_N: Tensor, by_entropy_N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_SH, weight_VH, bias_V = ctx.saved_tensors
        targets, wide = ctx.targets, by_logprob_N.dtype
        d_hidden = torch.empty_like(hidden_SH) if ctx.needs_input_grad[0] else None
        d_weight: Tensor | None = None
        d_bias: Tensor | None = None
        rows = max(1, block_logits(hidden_SH.device) // weight_VH.shape[0])
        for sites, _ in _chunks(targets, slice(0, len(hidden_SH)), ctx.size):
            d_sV = nn.functional.linear(hidden_SH[sites], weight_VH, bias_V)
            for at, own in _chunks(targets, sites, rows):
                block = d_sV[at.start - sites.start : at.stop - sites.start]
                bonus_n = by_entropy_N[own] if ctx.entropy_gradient else None
                _differentiate(block, targets, at, own, by_logprob_N[own], bonus_n)
            if d_hidden is not None:
                torch.mm(d_sV, weight_VH, out=d_hidden[sites])
            if ctx.needs_input_grad[2]:
                share_V = d_sV.sum(0, dtype=wide)
                d_bias = share_V if d_bias is None else d_bias + share_V
            if not ctx.needs_input_grad[1]:
                continue
            if d_weight is None:
                d_weight = d_sV.t() @ hidden_SH[sites]
            elif wide == d_sV.dtype:
                d_weight.addmm_(d_sV.t(), hidden_SH[sites])
            else:  # chunks add up in float32
                d_weight = d_weight.to(wide).add_(d_sV.t() @ hidden_SH[sites])
        d_weight = None if d_weight is None else d_weight.to(weight_VH.dtype)
        d_bias = None if d_bias is None or bias_V is None else d_bias.to(bias_V.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _differentiate(
    logits_sV: Tensor, targets: Targets, sites: slice, tokens: slice, by_logprob_n: Tensor,
    by_entropy_n: Tensor | None,
) -> None:  # fmt: skip
    """Overwrite the logits of a block of sites with the gradient by them."""
    local_n, ids_n = targets.site_N[tokens] - sites.start, targets.ids_N[tokens]
    temperature_s1 = targets.temperature_S[sites, None].to(by_logprob_n.dtype)
    logs_sV, slope_sV = _log_softmax(logits_sV, temperature_s1, targets.softcap)
    probs_sV = logs_sV.exp()
    sums_s1 = probs_sV.new_zeros(probs_sV.shape[0]).index_add_(0, local_n, by_logprob_n)[:, None]
    if by_entropy_n is None:
        d_sV = probs_sV.mul_(-sums_s1 / temperature_s1)
    else:
        entropy_s = -torch.linalg.vecdot(probs_sV, logs_sV)
        bonus_s1 = probs_sV.new_zeros(probs_sV.shape[0]).index_add_(0, local_n, by_entropy_n)[:, None]
        logs_sV.add_(entropy_s[:, None]).mul_(-bonus_s1).sub_(sums_s1)
        d_sV = logs_sV.mul_(probs_sV).div_(temperature_s1)
    d_sV.index_put_((local_n, ids_n), by_logprob_n / temperature_s1[local_n, 0], accumulate=True)
    logits_sV.copy_(d_sV if slope_sV is None else d_sV.mul_(slope_sV))


def _of_module(
    head: nn.Module, hidden_SH: Tensor, targets: Targets, size: int, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    def score(hidden_sH: Tensor, temperature_s: Tensor, local_n: Tensor, ids_n: Tensor) -> tuple[Tensor, ...]:
        logits_sV = head(hidden_sH)
        wide = torch.promote_types(logits_sV.dtype, torch.float32)
        logs_sV, _ = _log_softmax(logits_sV, temperature_s[:, None].to(wide), targets.softcap)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_s = -torch.linalg.vecdot(logs_sV.exp(), logs_sV)
        return logs_sV[local_n, ids_n], entropy_s[local_n]

    parts = [
        checkpoint(
            score, hidden_SH[sites], targets.temperature_S[sites], targets.site_N[tokens] - sites.start,
            targets.ids_N[tokens], use_reentrant=False, preserve_rng_state=False,
        )
        for sites, tokens in _chunks(targets, slice(0, len(hidden_SH)), size)
    ]  # fmt: skip
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _causal_lm(model: Any) -> Any:
    if hasattr(model, "get_base_model"):
        if model.active_peft_config.is_prompt_learning:
            raise ConfigError("a prompt-learning adapter cannot be trained here; use LoRA")
        model = model.get_base_model()
    if model not in _refusals:
        with dropout_off(model):
            _refusals[model] = _refusal(model)
    if _refusals[model]:
        raise ConfigError(_refusals[model])
    return model


_HEAD_TOLERANCE = 0.02
"""largest deviation of our logits from the model's own, as a share of the largest: rounding in bfloat16"""
_refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""why a model cannot be trained; empty if it can"""


def refuse_untrainable(model: nn.Module) -> None:
    """Raises ConfigError for a model whose log-probs cannot be computed here; tested once a model."""
    _causal_lm(model)


def _logit_scale(config: Any) -> float:
    """Factor of the head's output: `logit_scale` of Cohere, 1 / `logits_scaling` of Granite."""
    scale = getattr(config, "logit_scale", None) or 1.0
    return float(scale) / float(getattr(config, "logits_scaling", None) or 1.0)


@torch.no_grad()
def _refusal(causal: Any) -> str:
    """Why the log-probs of this model cannot be computed; empty if they can: its logits are compared with
    those of head and backbone, scaled and capped as `score_tokens` does."""
    name = getattr(getattr(causal, "config", None), "model_type", None) or type(causal).__name__
    known = "a causal LM such as Llama, Qwen, Mistral, Gemma, Phi, GLM, gpt-oss or GPT-2 can be trained"
    try:
        embedding = causal.get_input_embeddings().weight
        ids_BT = torch.arange(1, 12, device=embedding.device)[None] % embedding.shape[0]
        plain = causal(input_ids=ids_BT, use_cache=False).logits
        states = backbone(causal)(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits = causal.get_output_embeddings()(states) * _logit_scale(causal.config)
        if cap := getattr(causal.config, "final_logit_softcapping", None):
            logits = (logits / cap).tanh() * cap
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # other modelling code may raise any of these for arguments that it does not expect
        return f"the architecture {name} cannot be trained here ({type(error).__name__}: {error}); {known}"
    if not plain.isfinite().all():
        return ""  # broken weights are reported by the guards
    deviation = float((plain - logits).abs().max() / plain.abs().max().clamp(min=1e-12))
    if deviation <= _HEAD_TOLERANCE:
        return ""
    return (
        f"the architecture {name} computes its logits in a way that is not known here (they deviate by"
        f" {deviation:.2g} of the largest), so log-probs would be wrong; {known}"
    )


@contextmanager
def low_memory_forwards(model: nn.Module) -> Iterator[None]:
    """Temporarily replace the forwards of known modules by the low-memory ones; not norms of float64 weights,
    which transformers computes in float32."""
    swapped: list[nn.Module] = []
    for module in model.modules():
        forward = _low_memory_forward(module)
        if forward is not None and "forward" not in vars(module):
            setattr(module, "forward", forward)  # noqa: B010 (a method may not be assigned to)
            swapped.append(module)
    try:
        yield
    finally:
        for module in swapped:
            del module.forward


def _low_memory_forward(module: Any) -> Callable[..., Tensor] | None:
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return None if module.weight.dtype is torch.float64 else partial(_norm, module)
    act = type(getattr(module, "act_fn", None)).__name__
    if kind.endswith("MLP") and act in ("SiLU", "SiLUActivation"):
        parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
        return partial(_gated, module) if {name for name, _ in module.named_children()} == parts else None
    return None


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.is_cuda:  # PyTorch's kernel keeps as little, and is the sampler's
        weight: Tensor = module.weight
        return nn.functional.rms_norm(hidden_states, weight.shape, weight, module.variance_epsilon)
    apply: Callable[..., Tensor] = _RMSNorm.apply
    return apply(hidden_states, module.weight, module.variance_epsilon)


def _gated(module: Any, x: Tensor) -> Tensor:
    apply: Callable[..., Tensor] = _SiluProduct.apply
    out: Tensor = module.down_proj(apply(module.gate_proj(x), module.up_proj(x)))
    return out


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # float32: so is the scale
        inner = (grad * weight).float()
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        share = torch.linalg.vecdot(inner, normed).div_(x.shape[-1])[..., None]
        d_x = inner.addcmul_(normed, share, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, nn.functional.silu(gate).mul_(grad)


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""largest allowed difference between tree and rows, relative to the largest hidden value"""
_supported: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def backbone(causal: Any) -> Any:
    """The part of a causal LM below its head."""
    return causal.base_model


def tree_hidden(causal: Any, tree: TokenTree) -> Tensor:
    """[N, H] last hidden states of the nodes under a causal LM."""
    again = partial(_as_in_forward, causal)
    with _tree_attention(causal), low_memory_forwards(causal), _checkpointed(causal, again):
        hidden: Tensor = backbone(causal)(
            input_ids=tree.ids_N[None],
            position_ids=tree.positions_N[None],
            # a 4-dimensional mask is passed on unchanged, and ours is not read
            attention_mask=tree.ids_N.new_ones((1, 1, 1, 1), dtype=torch.bool),
            use_cache=False,
            nano_tree=tree,
        ).last_hidden_state
    return hidden[0]


def row_states(causal: Any, ids_BT: Tensor, attention_BT: Tensor) -> tuple[Tensor, Tensor]:
    """([M, H] last hidden states of rows padded on the right, [B, T] index of each token's state), over the
    token tree, or row by row if the model cannot share prefixes."""
    if shares_prefixes(causal):
        tree = build_tree(ids_BT, attention_BT.long().sum(1).tolist())
        return tree_hidden(causal, tree), tree.node_BT
    with _checkpointed(causal, dropout_off):
        hidden_BTH: Tensor = backbone(causal)(
            input_ids=ids_BT, attention_mask=attention_BT, use_cache=False
        ).last_hidden_state
    every = torch.arange(ids_BT.numel(), device=ids_BT.device).view(ids_BT.shape)
    return hidden_BTH.flatten(0, 1), every


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Temporarily no dropout, in any mode of the model."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _as_in_forward(causal: Any, layer: nn.Module) -> Iterator[None]:
    """What surrounds the forward pass along a tree, for a layer that the backward pass computes again."""
    with _tree_attention(causal), low_memory_forwards(layer), dropout_off(layer):
        yield


@contextmanager
def _checkpointed(
    causal: nn.Module, again: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """Keep the input of each layer that `checkpoint_layers` has marked; it is computed again in the backward
    pass, in the context that `again` gives for it."""
    layers = [layer for layer in causal.modules() if getattr(layer, "gradient_checkpointing", False) is True]
    for layer in layers if torch.is_grad_enabled() else ():
        contexts = partial(lambda layer: (nullcontext(), again(layer)), layer)
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        layer.training, layer._gradient_checkpointing_func = True, run  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def checkpoint_layers(model: nn.Module) -> None:
    """Mark all layers of the model for gradient checkpointing. Raises ConfigError if it has none."""
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that transformers can checkpoint; leave"
            " gradient_checkpointing out"
        )
    unmap_freed_memory()
    for layer in layers:
        setattr(layer, "gradient_checkpointing", True)  # noqa: B010 - no attribute that torch declares


def shares_prefixes(causal: nn.Module) -> bool:
    """True if the model gives the same states along a tree as row by row; tested once, with a warning if
    not."""
    if causal not in _supported:
        reason = _objection(causal)
        _supported[causal] = reason is None
        if reason is not None:
            warnings.warn(
                f"tree_fallback: {type(causal).__name__} runs on independent rows, prefixes are computed"
                f" again for each: {reason}",
                stacklevel=2,
            )
    return _supported[causal]


@contextmanager
def independent_rows(causal: nn.Module) -> Iterator[None]:
    """Temporarily run rows independently, for comparison."""
    before = shares_prefixes(causal)
    _supported[causal] = False
    try:
        yield
    finally:
        _supported[causal] = before


def config_objection(config: Any) -> str | None:
    """Why a model of this configuration cannot share prefixes, as far as that says: the rows of the test are
    too short to show a window."""
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, name, None) is not None and getattr(config, f"use_{name}", True):
            return f"it has {name}={getattr(config, name)}"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    return None


def _objection(causal: Any) -> str | None:
    if objection := config_objection(getattr(causal, "config", None)):
        return objection
    try:
        difference = _difference(causal)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # other modelling code may raise any of these for arguments that it does not expect
        return f"{type(error).__name__}: {error}".splitlines()[0]
    bound = _TOLERANCE.get(causal.get_input_embeddings().weight.dtype, _TOLERANCE[torch.float32])
    return None if difference <= bound else f"it gives other values along a tree (by {difference:.2g})"


@torch.no_grad()
def _difference(causal: Any) -> float:
    """Largest relative difference between tree and plain rows, on rows with nested forks."""
    embedding: Tensor = causal.get_input_embeddings().weight
    vocabulary, device = embedding.shape[0], embedding.device
    prefix = [(7 * i + 3) % vocabulary for i in range(12)]
    rows = [[*prefix, 1, 2, 3], [*prefix, 1, 2, 4, 5, 0], [*prefix[:5], 6 % vocabulary, 1], [2, *prefix]]
    width = max(map(len, rows))
    lengths = [len(row) for row in rows]
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device) % vocabulary
    tree = build_tree(ids_BT, lengths)
    real_BT = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    with _in_float32(backbone(causal)):
        along = tree_hidden(causal, tree)[tree.node_BT]
        plain = backbone(causal)(
            input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False
        ).last_hidden_state
    if not plain[real_BT].isfinite().all():
        return 0.0  # broken weights are reported by the guards
    worst = (along - plain).abs()[real_BT].max() / plain[real_BT].abs().max().clamp(min=1e-12)
    return float(worst)


@contextmanager
def _in_float32(body: nn.Module) -> Iterator[None]:
    """Temporarily widen weights of lower precision, one layer at a time while it runs: in bfloat16 rounding
    alone changes the states of thirty trained layers by a third, as much as a wrong mask."""
    narrow: list[tuple[nn.Parameter, Tensor]] = []

    def widen(part: nn.Module, _: Any) -> None:
        for parameter in part.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                narrow.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        while narrow:
            parameter, data = narrow.pop()
            parameter.data = data

    with ExitStack() as hooks:
        hooks.callback(restore)
        for child in body.children():
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                hooks.enter_context(part.register_forward_pre_hook(widen))
                hooks.enter_context(part.register_forward_hook(restore, always_call=True))
        yield


@contextmanager
def _tree_attention(causal: Any) -> Iterator[None]:
    """Temporarily select the tree attention in the model's config."""
    config = getattr(causal, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise TreeUnsupported("its attention cannot be chosen")
    register()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def layers_of(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
