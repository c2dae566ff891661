"""Log-probs of chosen tokens from hidden states, with the head's gradient formed while its logits exist.

A site is a hidden state that predicts; several tokens may be predicted at one site. The head runs over sites
a chunk at a time and no logits outlive their chunk. Where the derivative of the loss by each log-prob can be
anticipated (a loss that is separable over tokens), the gradients of hidden states and head are made from the
same logits: three products a site, two where the head is frozen. The backward pass compares the derivative
that really arrives with the one anticipated, and computes the logits again where they differ; so the
anticipation can cost time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**25
"""logits that exist at once, in elements"""

Anticipate = Callable[[Tensor, Tensor, slice], Tensor]
"""log-probs and entropies [n] of a slice of the tokens -> their share of the loss"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """N tokens to score at S sites, in the order of their sites."""

    site_N: Tensor
    """int64, not decreasing"""
    ids_N: Tensor
    temperature_S: Tensor


@dataclass(slots=True)
class _Plan:
    targets: Targets
    chunks: list[tuple[slice, slice]]
    """sites, and the tokens at them"""
    anticipate: Anticipate | None
    entropy: bool
    entropy_gradient: bool


def selected_scores(
    head: nn.Module,
    hidden_SH: Tensor,
    targets: Targets,
    *,
    chunk_tokens: int | None = None,
    entropy: bool = True,
    entropy_gradient: bool = False,
    anticipate: Anticipate | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N], float32 or better; entropies are 0 without `entropy`.

    A head that is more than a plain linear layer (an adapter on it, hooks, a bias elsewhere) is called as a
    module and recomputed in the backward pass.
    """
    plan = _Plan(targets, [], anticipate, entropy or entropy_gradient, entropy_gradient)
    if hidden_SH.shape[0] == 0:
        # still joined to the model, so that a batch without trained tokens has a gradient: zero
        nothing = hidden_SH.sum(dim=1).to(torch.promote_types(hidden_SH.dtype, torch.float32))
        return nothing, nothing.detach()
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        plan.chunks = _chunks(targets, chunk_tokens or max(1, CHUNK_LOGITS // 2**15))
        return _recomputed(head, hidden_SH, plan)
    plan.chunks = _chunks(targets, chunk_tokens or max(1, CHUNK_LOGITS // head.out_features))
    if torch.is_grad_enabled() and (hidden_SH.requires_grad or head.weight.requires_grad):
        logprobs_N, entropy_N = _Selected.apply(hidden_SH, head.weight, head.bias, plan)
    else:
        logprobs_N, entropy_N = _Pass(hidden_SH, head.weight, head.bias, plan).run(None)
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


def _chunks(targets: Targets, size: int) -> list[tuple[slice, slice]]:
    sites = targets.temperature_S.shape[0]
    starts = list(range(0, sites, size))
    bounds = torch.searchsorted(
        targets.site_N, torch.tensor([*starts, sites], device=targets.site_N.device)
    ).tolist()
    return [
        (slice(start, min(start + size, sites)), slice(bounds[i], bounds[i + 1]))
        for i, start in enumerate(starts)
    ]


Derivative = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor | None]]
"""log-probs and entropies of a slice -> derivatives of the loss by both"""


class _Pass:
    """One walk over the chunks; the gradients it forms stand in `d_hidden`, `d_weight` and `d_bias`."""

    def __init__(self, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan) -> None:
        self._hidden, self._weight, self._bias, self._plan = hidden_SH, weight_VH, bias_V, plan
        self._wide = torch.promote_types(hidden_SH.dtype, torch.float32)
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None

    def run(self, derivative: Derivative | None, trained: tuple[bool, ...] = ()) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N]. `trained` says which of hidden, weight and bias need a gradient."""
        targets = self._plan.targets
        logprobs_N = self._hidden.new_zeros(targets.ids_N.shape, dtype=self._wide)
        entropy_N = torch.zeros_like(logprobs_N)
        if derivative is not None:
            self._make_room(trained)
        for sites, tokens in self._plan.chunks:
            local_n, ids_n = targets.site_N[tokens] - sites.start, targets.ids_N[tokens]
            temperature_s = targets.temperature_S[sites, None].to(self._wide)
            logs_sV = self._log_distribution(sites, temperature_s)
            logprobs_N[tokens] = logs_sV[local_n, ids_n]
            if self._plan.entropy:
                probs_sV = logs_sV.exp()
                entropy_s = -torch.linalg.vecdot(probs_sV, logs_sV)
                entropy_N[tokens] = entropy_s[local_n]
            else:
                probs_sV = logs_sV.exp_() if derivative else logs_sV
                entropy_s = None
            if derivative is None:
                continue
            by_logprob_n, by_entropy_n = derivative(logprobs_N[tokens], entropy_N[tokens], tokens)
            sums_s = probs_sV.new_zeros(probs_sV.shape[0]).index_add_(0, local_n, by_logprob_n)[:, None]
            if by_entropy_n is None:
                d_sV = probs_sV.mul_(-sums_s / temperature_s)
            else:
                assert entropy_s is not None  # a derivative by entropy is asked for with the entropy
                bonus_s = probs_sV.new_zeros(sums_s.shape[0]).index_add_(0, local_n, by_entropy_n)[:, None]
                logs_sV.add_(entropy_s[:, None]).mul_(-bonus_s).sub_(sums_s)
                d_sV = logs_sV.mul_(probs_sV).div_(temperature_s)
            each_n = by_logprob_n / temperature_s[local_n, 0]
            d_sV.index_put_((local_n, ids_n), each_n, accumulate=True)
            self._accumulate(sites, d_sV)
        return logprobs_N, entropy_N

    def _log_distribution(self, sites: slice, temperature_s: Tensor) -> Tensor:
        logits_sV = nn.functional.linear(self._hidden[sites], self._weight, self._bias).to(self._wide)
        if bool((temperature_s != 1).any()):
            logits_sV.div_(temperature_s)
        return logits_sV.log_softmax(dim=-1)

    def _make_room(self, trained: tuple[bool, ...]) -> None:
        hidden, weight, bias = trained
        if hidden:
            self.d_hidden = torch.empty_like(self._hidden)
        if weight:
            self.d_weight = torch.zeros_like(self._weight, dtype=self._wide)
        if bias and self._bias is not None:
            self.d_bias = torch.zeros_like(self._bias, dtype=self._wide)

    def _accumulate(self, sites: slice, d_sV: Tensor) -> None:
        narrow_sV = d_sV.to(self._weight.dtype)
        if self.d_hidden is not None:
            torch.mm(narrow_sV, self._weight, out=self.d_hidden[sites])
        if self.d_bias is not None:
            self.d_bias += d_sV.sum(0)
        if self.d_weight is None:
            return
        if self.d_weight.dtype == narrow_sV.dtype:
            self.d_weight.addmm_(narrow_sV.t(), self._hidden[sites])
        else:
            self.d_weight += narrow_sV.t() @ self._hidden[sites]

    def gradients(self, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Of hidden states, weight and bias, in the type of each."""
        made = (self.d_hidden, self.d_weight, self.d_bias)
        given = (self._hidden, self._weight, self._bias)
        if scale is not None:
            made = tuple(None if g is None else g.mul_(scale) for g in made)
        return tuple(
            None if g is None or x is None else g.to(x.dtype) for g, x in zip(made, given, strict=True)
        )


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_SH, weight_VH, bias_V)
        ctx.plan, ctx.made = plan, None
        if plan.anticipate is None:
            return _Pass(hidden_SH, weight_VH, bias_V, plan).run(None)
        expected: list[tuple[Tensor, Tensor | None]] = []

        def derivative(logprobs_n: Tensor, entropy_n: Tensor, tokens: slice) -> tuple[Tensor, Tensor | None]:
            expected.append(_differentiate(plan, logprobs_n, entropy_n, tokens))
            return expected[-1]

        walk = _Pass(hidden_SH, weight_VH, bias_V, plan)
        scores = walk.run(derivative, tuple(ctx.needs_input_grad[:3]))
        by_entropy = [e for _, e in expected if e is not None]
        ctx.made = walk, torch.cat([g for g, _ in expected]), torch.cat(by_entropy) if by_entropy else None
        return scores

    @staticmethod
    def backward(ctx: Any, by_logprob_N: Tensor, by_entropy_N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_SH, weight_VH, bias_V = ctx.saved_tensors
        bonus_N = by_entropy_N if ctx.plan.entropy_gradient else None
        if ctx.made is not None:
            walk, expected_N, expected_bonus_N = ctx.made
            ctx.made = None  # given away: a second backward pass computes again
            if _agree(by_logprob_N, expected_N) and _agree(bonus_N, expected_bonus_N):
                return (*walk.gradients(), None)
        again = _Pass(hidden_SH, weight_VH, bias_V, ctx.plan)
        again.run(
            lambda logprobs, entropy, tokens: (
                by_logprob_N[tokens],
                None if bonus_N is None else bonus_N[tokens],
            ),
            tuple(ctx.needs_input_grad[:3]),
        )
        return (*again.gradients(), None)


def _differentiate(
    plan: _Plan, logprobs_n: Tensor, entropy_n: Tensor, tokens: slice
) -> tuple[Tensor, Tensor | None]:
    assert plan.anticipate is not None
    with torch.enable_grad():
        logprobs_n = logprobs_n.detach().requires_grad_()
        entropy_n = entropy_n.detach().requires_grad_(plan.entropy_gradient)
        loss = plan.anticipate(logprobs_n, entropy_n, tokens)
        inputs = (logprobs_n, entropy_n) if plan.entropy_gradient else (logprobs_n,)
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
    return grads[0], grads[1] if plan.entropy_gradient else None


def _agree(real: Tensor | None, expected: Tensor | None) -> bool:
    """Up to the last bits, which vectorised and scalar code round differently."""
    if real is None or expected is None:
        return real is None and expected is None
    tolerance = 32 * torch.finfo(expected.dtype).eps
    return bool(((real - expected).abs() <= tolerance * expected.abs().max()).all())


def _recomputed(head: nn.Module, hidden_SH: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    def score(
        hidden_sH: Tensor, temperature_s: Tensor, local_n: Tensor, ids_n: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits_sV = head(hidden_sH)
        logits_sV = logits_sV.to(torch.promote_types(logits_sV.dtype, torch.float32))
        logs_sV = (logits_sV / temperature_s.to(logits_sV.dtype)[:, None]).log_softmax(dim=-1)
        with torch.set_grad_enabled(plan.entropy_gradient and torch.is_grad_enabled()):
            entropy_s = -torch.linalg.vecdot(logs_sV.exp(), logs_sV)
        return logs_sV[local_n, ids_n], entropy_s[local_n]

    targets = plan.targets
    parts = [
        checkpoint(
            score, hidden_SH[sites], targets.temperature_S[sites], targets.site_N[tokens] - sites.start,
            targets.ids_N[tokens], use_reentrant=False, preserve_rng_state=False,
        )
        for sites, tokens in plan.chunks
    ]  # fmt: skip
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
