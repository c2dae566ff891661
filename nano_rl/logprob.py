"""Log-probs of the trained tokens under a causal LM, without ever holding the logits of a batch.

The backbone runs once over the batch; the head runs only on positions that predict a trained token, a chunk
at a time, and each chunk is recomputed in the backward pass, so that at most `chunk_tokens` rows of logits
exist. Left out: packed rows, and prefix trees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
    return _run(model, batch, chunk_tokens, _logprobs)[0]


def score_tokens(model: nn.Module, batch: Batch, *, chunk_tokens: int = CHUNK_TOKENS) -> TokenScores:
    """As `token_logprobs`, with entropies read off the same logits: about a quarter more time in the head."""
    logprobs_BT, entropy_BT = _run(model, batch, chunk_tokens, _logprobs_and_entropy)
    return TokenScores(logprobs_BT=logprobs_BT, entropy_BT=entropy_BT)


def _run(
    model: nn.Module, batch: Batch, chunk_tokens: int, score: Callable[..., tuple[Tensor, ...]]
) -> list[Tensor]:
    """[B, T] for each of the values that `score` gives for the N trained tokens."""
    causal = _causal_lm(model)
    with _dropout_off(model):
        hidden_BTH: Tensor = causal.model(
            input_ids=batch.ids_BT, attention_mask=batch.attention_BT, use_cache=False
        ).last_hidden_state
        rows_N, positions_N = batch.mask_BT.nonzero(as_tuple=True)
        # the state before a token predicts it
        inputs = (
            hidden_BTH[rows_N, positions_N - 1],
            batch.ids_BT[rows_N, positions_N],
            batch.temperature_B[rows_N],
        )
        chunks = zip(*(torch.split(values_N, chunk_tokens) for values_N in inputs), strict=True)
        scores = [
            checkpoint(score, causal.lm_head, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
    return [_scatter(torch.cat(parts), batch.mask_BT) for parts in zip(*scores, strict=True)]


def _logprobs(
    head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, ...]:
    logprobs_NV = _distribution(head, hidden_NH, temperature_N)
    return (logprobs_NV.gather(1, targets_N[:, None]).squeeze(1),)


def _logprobs_and_entropy(
    head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, ...]:
    logprobs_NV = _distribution(head, hidden_NH, temperature_N)
    with torch.no_grad():
        entropy_N = -torch.linalg.vecdot(logprobs_NV.exp(), logprobs_NV)
    return logprobs_NV.gather(1, targets_N[:, None]).squeeze(1), entropy_N


def _distribution(head: nn.Module, hidden_NH: Tensor, temperature_N: Tensor) -> Tensor:
    logits_NV: Tensor = head(hidden_NH)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return (logits_NV / temperature_N.to(logits_NV.dtype)[:, None]).log_softmax(dim=-1)


def _scatter(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)


def _causal_lm(model: Any) -> Any:
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
