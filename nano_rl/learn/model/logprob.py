"""Log-probs of the trained tokens under a causal LM, with shared prefixes computed once.

The backbone runs over the token tree of the rows (`prefix_tree.py`), or over the padded rows if the model
does not support it. A site is a hidden state at which one or several trained tokens are predicted; the head
runs over chunks of sites, whose logits are freed and computed again in the backward pass, so that those of a
whole batch never exist at once. Values and gradients equal those of independent rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nano_rl.learn.rows.batch import Batch
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

    Logits are divided by the row's temperature before the softmax, as in sampling. Dropout is off in any mode
    of the model, so that passes are comparable.
    The model is a causal LM of transformers, bare or under PEFT.

    Raises ConfigError for a model whose logits are computed in a way that is not known here.
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


CHUNK_LOGITS, GPU_CHUNK_LOGITS = 2**22, 2**26
"""number of logits that exist at once, in float32: few enough for a CPU's caches, and many launches' worth"""


def chunk_logits(device: torch.device) -> int:
    return CHUNK_LOGITS if device.type == "cpu" else GPU_CHUNK_LOGITS


def selected_scores(
    head: nn.Module, hidden_SH: Tensor, targets: Targets, *, chunk_tokens: int | None = None,
    entropy: bool = True, entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[N] log-probs and [N] entropies, nats, at least float32; entropies are 0 without `entropy`."""
    sites = hidden_SH.shape[0]
    if sites == 0:
        # keep the graph, so that a batch without trained tokens has a gradient of zero
        nothing = hidden_SH.sum(dim=1).to(torch.promote_types(hidden_SH.dtype, torch.float32))
        return nothing, nothing.detach()

    def score(hidden_sH: Tensor, temperature_s: Tensor, local_n: Tensor, ids_n: Tensor) -> tuple[Tensor, ...]:
        logits_sV = head(hidden_sH)
        logits_sV = logits_sV.to(torch.promote_types(logits_sV.dtype, torch.float32))
        if targets.softcap:
            logits_sV = (logits_sV / targets.softcap).tanh() * targets.softcap
        logs_sV = (logits_sV / temperature_s.to(logits_sV.dtype)[:, None]).log_softmax(dim=-1)
        logprobs_n = logs_sV[local_n, ids_n]
        if not entropy:
            return logprobs_n, torch.zeros_like(logprobs_n)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_s = -torch.linalg.vecdot(logs_sV.exp(), logs_sV)
        return logprobs_n, entropy_s[local_n]

    vocabulary = getattr(head, "out_features", 2**15)
    size = chunk_tokens or max(1, chunk_logits(hidden_SH.device) // vocabulary)
    starts = [*range(0, sites, size), sites]
    bounds = torch.searchsorted(targets.site_N, torch.tensor(starts, device=targets.site_N.device)).tolist()
    parts = []
    for i, (start, end) in enumerate(pairwise(starts)):
        tokens = slice(bounds[i], bounds[i + 1])
        parts.append(
            checkpoint(
                score, hidden_SH[start:end], targets.temperature_S[start:end],
                targets.site_N[tokens] - start, targets.ids_N[tokens], use_reentrant=False,
                preserve_rng_state=False,
            )
        )  # fmt: skip
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
    """Why the log-probs of this model cannot be computed; empty if they can.

    Compares the logits of head and backbone, scaled and capped as `score_tokens` does, with the model's own.
    """
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
