"""Log-probs of sampled tokens: the head runs on masked positions alone, no full logits are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nano_rl.batch import Batch

_CHUNK = 512
"""positions whose logits exist at once: 512 x 49,152 float32 are 100 MB"""


def token_logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """[B, T] float32: log-prob of each sampled token given what came before, at its row's temperature.

    0 where the mask is 0. Works on causal language models of transformers, bare or under a PEFT adapter.
    """
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    hidden = causal.model(input_ids=batch.ids_BT, attention_mask=batch.attention_BT, use_cache=False)[0]
    rows, columns = batch.mask_BT.nonzero(as_tuple=True)
    values = torch.zeros_like(batch.behaviour_BT)
    if len(rows) == 0:
        return values + 0.0 * hidden.float().sum()
    # the token at t is predicted at t - 1
    states = hidden[rows, columns - 1]
    targets = batch.ids_BT[rows, columns]
    temperatures = batch.temperatures_B[rows]
    pieces = [
        checkpoint(
            _chunk, causal.lm_head, states[i : i + _CHUNK], targets[i : i + _CHUNK], temperatures[i : i + _CHUNK],
            use_reentrant=False,
        )
        for i in range(0, len(rows), _CHUNK)
    ]  # fmt: skip
    return values.to(pieces[0].dtype).index_put((rows, columns), torch.cat(pieces))


def _chunk(
    head: torch.nn.Module, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    logits = head(states)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide / temperatures[:, None].to(wide.dtype), dim=-1).gather(1, targets[:, None])[
        :, 0
    ]
