"""The policy: a causal language model of 90,000 weights, its vocabulary, and what it samples.

A token is recorded when it is sampled, with its log-probability, and never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

END = "<end>"
"""ends an action; sampled by the policy, so it is trained like any other token"""
MAX_ACTION_TOKENS = 10


@dataclass(slots=True)
class Completion:
    ids: list[int] = field(default_factory=list)
    """sampled tokens, END included"""
    logprobs: list[float] = field(default_factory=list)
    """of each, nats, at temperature 1 over the whole vocabulary"""


class Policy:
    def __init__(self, words: Sequence[str], seed: int) -> None:
        self.words = [END, *words]
        self.ids = {word: number for number, word in enumerate(self.words)}
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(self.words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
            bos_token_id=None, eos_token_id=0, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[number] for number in ids if number != self.ids[END])

    @torch.no_grad()
    def complete(self, rows: Sequence[Sequence[int]]) -> list[Completion]:
        """Sample the next action of each row of tokens, all rows side by side."""
        completions = [Completion() for _ in rows]
        running = list(range(len(rows)))
        for _ in range(MAX_ACTION_TOKENS):
            ids_BT = padded([[*rows[i], *completions[i].ids] for i in running])
            last_B = torch.tensor([len(rows[i]) + len(completions[i].ids) - 1 for i in running])
            logits_BV = self.model(ids_BT, use_cache=False).logits[torch.arange(len(running)), last_B]
            logprobs_BV = logits_BV.log_softmax(-1)
            chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=self.generator)
            logprobs_B = logprobs_BV.gather(1, chosen_B1)[:, 0]
            for i, token, logprob in zip(running, chosen_B1[:, 0].tolist(), logprobs_B.tolist(), strict=True):
                completions[i].ids.append(token)
                completions[i].logprobs.append(logprob)
            running = [i for i in running if completions[i].ids[-1] != self.ids[END]]
            if not running:
                break
        return completions

    def logprobs(self, ids_BT: Tensor) -> Tensor:
        """[B, T] log-probability of each token given those before it, with gradient; 0 for the first."""
        logits_BTV = self.model(ids_BT, use_cache=False).logits[:, :-1]
        logprobs_BT = logits_BTV.log_softmax(-1).gather(2, ids_BT[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(logprobs_BT, (1, 0))


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64) -> Tensor:
    """[B, T] rows filled up with zeros on the right, which no token before them can see in a causal model."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)
