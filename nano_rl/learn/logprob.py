"""Log-probs of the trained tokens under a causal LM, with shared prefixes computed once.

A site is a hidden state at which one or several trained tokens are predicted; the head runs over chunks of
sites, whose logits are freed and computed again in the backward pass. Values and gradients equal those of
independent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nano_rl.learn.batch import Batch
from nano_rl.learn.tree_forward import (
    backbone,
    dropout_off,
    independent_rows,
    row_states,
    shares_prefixes,
)
from nano_shared.errors import ConfigError


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
    """[B, T] log-probs of `ids_BT` where `mask_BT` is True, 0 elsewhere; float32 (float64 stays).

    Logits are divided by the row's temperature, as in sampling. Dropout is off, so that passes are
    comparable. Raises ConfigError for a model whose logits are computed in a way that is not known here.
    """
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
