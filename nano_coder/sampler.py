"""The sampler: draws one token a row from its own random numbers, with exact log-probs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nano_shared import Sampling


class Sampler:
    """Inverse-CDF sampling for a batch. Suffix _B: one entry a live row.

    Every row draws all its uniforms at the start from a CPU generator of its own seed: the numbers depend
    neither on the batch nor on the device, and a step costs no call per row.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Sampling, int | None]],
        limits: Sequence[int],
        device: torch.device,
    ) -> None:
        """`rows`: sampling and seed of each row; `limits`: how many tokens each may draw."""
        samplings = [sampling for sampling, _ in rows]
        self.greedy_B = torch.tensor([s.temperature == 0 for s in samplings], device=device)
        self.temperature_B = torch.tensor([s.temperature or 1.0 for s in samplings], device=device)[:, None]
        self.top_p_B = torch.tensor([s.top_p for s in samplings], device=device, dtype=torch.float64)[:, None]
        self.top_k_B = torch.tensor([s.top_k for s in samplings], device=device)[:, None]
        self.uniforms_BT = _uniforms([seed for _, seed in rows], limits).to(device)
        self._survey()

    def draw(self, logits_BV: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[B] tokens and [B] float32 log-probs of the processed distribution, renormalised.

        Temperature first, then top-k, then top-p. A greedy row takes the likeliest token, with log-probs
        of temperature 1.
        """
        logits_BV = logits_BV.float()
        if self._tempered:
            logits_BV = logits_BV / self.temperature_B
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        if self._truncated:
            logprobs_BV = self._truncate(logprobs_BV)
        tokens_B = self._invert(logprobs_BV, step)
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]

    def keep(self, places: torch.Tensor) -> None:
        """Forget all rows but those."""
        for name in ("greedy_B", "temperature_B", "top_p_B", "top_k_B", "uniforms_BT"):
            setattr(self, name, getattr(self, name)[places])
        self._survey()

    def _survey(self) -> None:
        """Which stages any row needs, asked once and not at each step."""
        self._any_greedy = bool(self.greedy_B.any())
        self._all_greedy = bool(self.greedy_B.all())
        self._tempered = bool((self.temperature_B != 1).any())
        self._truncated = bool((self.top_p_B < 1).any() or (self.top_k_B > 0).any())

    def _invert(self, logprobs_BV: torch.Tensor, step: int) -> torch.Tensor:
        if self._all_greedy:
            return logprobs_BV.argmax(dim=-1)
        # float64: in float32 the rounding of 49k partial sums would swallow the tail
        cdf_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        targets_B1 = self.uniforms_BT[:, step, None] * cdf_BV[:, -1:]
        # right=True skips tokens of probability 0, whose CDF does not rise
        tokens_B = torch.searchsorted(cdf_BV, targets_B1, right=True)[:, 0].clamp_(max=cdf_BV.shape[1] - 1)
        if self._any_greedy:
            tokens_B = torch.where(self.greedy_B, logprobs_BV.argmax(dim=-1), tokens_B)
        return tokens_B

    def _truncate(self, logprobs_BV: torch.Tensor) -> torch.Tensor:
        ordered_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
        rank_V = torch.arange(ordered_BV.shape[1], device=ordered_BV.device)
        drop_BV = (self.top_k_B > 0) & (rank_V >= self.top_k_B)
        probs_BV = ordered_BV.masked_fill(drop_BV, -torch.inf).softmax(dim=-1, dtype=torch.float64)
        # nucleus: a token stays if the tokens before it do not reach top_p yet (Holtzman et al. 2020)
        before_BV = probs_BV.cumsum(dim=-1) - probs_BV
        drop_BV |= (self.top_p_B < 1) & (before_BV >= self.top_p_B)
        drop_BV[:, 0] = False
        kept_BV = ordered_BV.masked_fill(drop_BV, -torch.inf)
        return torch.empty_like(kept_BV).scatter_(1, order_BV, kept_BV).log_softmax(dim=-1)


def _uniforms(seeds: Sequence[int | None], limits: Sequence[int]) -> torch.Tensor:
    """[B, T] float64 in [0, 1), row by row from its own seed."""
    uniforms = torch.zeros((len(seeds), max(limits)), dtype=torch.float64)
    for row, (seed, limit) in enumerate(zip(seeds, limits, strict=True)):
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        uniforms[row, :limit] = torch.rand(limit, generator=generator, dtype=torch.float64)
    return uniforms
