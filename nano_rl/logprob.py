"""Log-probs of the trained tokens under a causal LM, without ever holding the logits of a batch.

The backbone runs once over the batch; the head runs only on positions that predict a trained token, a chunk
at a time, and each chunk is recomputed in the backward pass, so that at most `chunk_tokens` rows of logits
exist. Left out: packed rows, and prefix trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nano_rl.batch import Batch
from nano_shared import ConfigError

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    logprobs_BT: Tensor
    """at least float32, nats at the row's temperature; 0 where the mask is False"""
    entropy_BT: Tensor
    """entropy of the distribution that each trained token was drawn from, nats, without gradient; else 0"""


def token_logprobs(model: nn.Module, batch: Batch, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """[B, T] log-probs of `ids_BT` where `mask_BT` is True, 0 elsewhere; float32 (float64 stays).

    Logits are divided by the row's temperature before the softmax, as they were when the token was sampled.
    Dropout is off whatever the model's mode, so that this pass equals the one that sampled or scored before.
    The model is a Llama-like causal LM (`.model`, `.lm_head`), bare or under PEFT.

    Raises ConfigError for a model whose logits are not simply its head's output.
    """
    return score_tokens(model, batch, chunk_tokens=chunk_tokens).logprobs_BT


def score_tokens(model: nn.Module, batch: Batch, *, chunk_tokens: int = CHUNK_TOKENS) -> TokenScores:
    """As `token_logprobs`, with the entropies that the same logits give for free."""
    causal = _causal_lm(model)
    with _dropout_off(model):
        hidden_BTH = causal.model(
            input_ids=batch.ids_BT, attention_mask=batch.attention_BT, use_cache=False
        ).last_hidden_state
        rows_N, positions_N = batch.mask_BT.nonzero(as_tuple=True)
        # the state before a token predicts it
        hidden_NH = hidden_BTH[rows_N, positions_N - 1]
        targets_N = batch.ids_BT[rows_N, positions_N]
        scores = [
            checkpoint(_score, causal.lm_head, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(
                hidden_NH.split(chunk_tokens),
                targets_N.split(chunk_tokens),
                batch.temperature_B[rows_N].split(chunk_tokens),
                strict=True,
            )
        ]
    logprobs_N, entropy_N = (torch.cat(parts) for parts in zip(*scores, strict=True))
    return TokenScores(
        logprobs_BT=_scatter(logprobs_N, batch.mask_BT), entropy_BT=_scatter(entropy_N, batch.mask_BT)
    )


def _score(
    head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    logits_NV = head(hidden_NH)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    logprobs_NV = (logits_NV / temperature_N.to(logits_NV.dtype)[:, None]).log_softmax(dim=-1)
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(dim=-1)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)


def _causal_lm(model: nn.Module) -> nn.Module:
    if hasattr(model, "get_base_model"):
        if model.active_peft_config.is_prompt_learning:
            raise ConfigError("a prompt-learning adapter cannot be trained here; use LoRA")
        model = model.get_base_model()
    config = getattr(model, "config", None)
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"{type(model).__name__} has {name}={getattr(config, name)}: its logits are not its head's"
                " output, so log-probs would be wrong; use a Llama-like model"
            )
    return model


@contextmanager
def _dropout_off(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
