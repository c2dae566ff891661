"""Log-probs of the trained tokens under a causal LM, with shared prefixes computed once.

The backbone runs over the token tree of the rows (`prefix_tree.py`), or over the padded rows if the model
does not support it; the head runs only at positions that predict a trained token (`logprob_head.py`), and the
logits of a whole batch never exist at once. Values and gradients equal those of independent rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nano_rl.learn.model.logprob_head import Anticipate, Targets, selected_scores
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


ScoreLoss = Callable[[TokenScores, Batch], tuple[Tensor, dict[str, float]]]
"""scores of a batch -> its share of the loss, and metrics that are summed over batches"""


def token_logprobs(model: nn.Module, batch: Batch, *, chunk_tokens: int | None = None) -> Tensor:
    """[B, T] log-probs of `ids_BT` where `mask_BT` is True, 0 elsewhere; float32 (float64 stays).

    Logits are divided by the row's temperature before the softmax, as in sampling. Dropout is off in any mode
    of the model, so that passes are comparable.
    The model is a causal LM of transformers, bare or under PEFT.

    Raises ConfigError for a model whose logits are computed in a way that is not known here.
    """
    return score_tokens(model, batch, chunk_tokens=chunk_tokens, entropy=False).logprobs_BT


def loss_and_scores(
    model: nn.Module,
    batch: Batch,
    loss: ScoreLoss,
    *,
    separable: bool,
    entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The `loss` of the batch's scores, and its metrics; faster than `score_tokens` for training.

    `separable`: the loss is a sum over tokens of functions of that token's own scores and columns. The head's
    gradient is then computed in the forward pass. If that is wrong, the result is right and takes longer.
    """

    def anticipate(logprobs_n: Tensor, entropy_n: Tensor, tokens: Batch) -> Tensor:
        scores = TokenScores(logprobs_BT=logprobs_n[:, None], entropy_BT=entropy_n[:, None])
        return loss(scores, tokens)[0]

    scores = score_tokens(
        model,
        batch,
        entropy=entropy,
        entropy_gradient=entropy_gradient,
        anticipate=anticipate if separable else None,
    )
    return loss(scores, batch)


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
    model: nn.Module,
    batch: Batch,
    *,
    chunk_tokens: int | None = None,
    entropy: bool = True,
    entropy_gradient: bool = False,
    anticipate: Callable[[Tensor, Tensor, Batch], Tensor] | None = None,
) -> TokenScores:
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
        sliced: Anticipate | None = None
        if anticipate is not None:

            def sliced(logprobs_n: Tensor, entropy_n: Tensor, tokens: slice) -> Tensor:
                return anticipate(logprobs_n, entropy_n, batch.tokens(rows_N[tokens], positions_N[tokens]))

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
            anticipate=sliced,
        )
    place = rows_N, positions_N

    def scatter(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(batch.mask_BT.shape).index_put(place, values_N)

    return TokenScores(logprobs_BT=scatter(logprobs_N), entropy_BT=scatter(entropy_N))


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
