"""Log-probs of chosen tokens from hidden states; the head's gradient is computed while its logits exist.

A site is a hidden state at which one or several tokens are predicted. The head runs over chunks of sites, and
logits are freed with their chunk. If the loss is separable over tokens, its derivative by each log-prob is
computed ahead ("anticipated"), and the gradients of hidden states and head from the same logits: three matrix
products per site, two if the head is frozen. The backward pass compares the incoming derivative with the
anticipated one and recomputes the logits if they differ, so that the gradient is right in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**26
"""number of logits that exist at once, in the weights' precision"""
BLOCK_LOGITS = 2**20
"""number of logits that are processed at once in float32, so that they stay in a CPU's caches"""
GPU_BLOCK_LOGITS = 2**26
"""the same off the CPU, where each block costs some thirty launches"""

Anticipate = Callable[[Tensor, Tensor, slice], Tensor]
"""log-probs and entropies [n] of a slice of the tokens -> their share of the loss"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """N tokens to score at S sites, ordered by site."""

    site_N: Tensor
    """int64 index of each token's site, ascending"""
    ids_N: Tensor
    temperature_S: Tensor
    softcap: float | None = None
    """logits x become softcap * tanh(x / softcap), before the temperature"""


@dataclass(slots=True)
class _Plan:
    targets: Targets
    chunks: list[tuple[slice, slice]]
    """sites of each chunk, and the tokens at them"""
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
    """[N] log-probs and [N] entropies, nats, at least float32; entropies are 0 without `entropy`.

    A head that is not a plain linear layer (with an adapter or hooks) is called as a module and recomputed in
    the backward pass.
    """
    plan = _Plan(targets, [], anticipate, entropy or entropy_gradient, entropy_gradient)
    if hidden_SH.shape[0] == 0:
        # keep the graph, so that a batch without trained tokens has a gradient of zero
        nothing = hidden_SH.sum(dim=1).to(torch.promote_types(hidden_SH.dtype, torch.float32))
        return nothing, nothing.detach()
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        plan.chunks = _chunks(targets, chunk_tokens or max(1, CHUNK_LOGITS // 2**15))
        return _recomputed(head, hidden_SH, plan)
    plan.chunks = _chunks(targets, chunk_tokens or max(1, CHUNK_LOGITS // head.out_features))
    if torch.is_grad_enabled() and (hidden_SH.requires_grad or head.weight.requires_grad):
        apply: Callable[..., tuple[Tensor, Tensor]] = _Selected.apply
        logprobs_N, entropy_N = apply(hidden_SH, head.weight, head.bias, plan)
    else:
        logprobs_N, entropy_N = _Pass(hidden_SH, head.weight, head.bias, plan).run(None)
    return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach()


def block_logits(device: torch.device) -> int:
    """Number of logits that are processed at once in float32."""
    return BLOCK_LOGITS if device.type == "cpu" else GPU_BLOCK_LOGITS


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
"""log-probs and entropies of a slice of tokens -> derivatives of the loss by both"""


class _Pass:
    """One pass over the chunks; its gradients are in `d_hidden`, `d_weight` and `d_bias`.

    The logits of a chunk are one matrix product in the weights' precision. Softmax and derivative are
    computed in blocks of rows that fit into the caches, and the derivative overwrites the logits in place.
    """

    def __init__(self, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan) -> None:
        self._hidden, self._weight, self._bias, self._plan = hidden_SH, weight_VH, bias_V, plan
        self._wide = torch.promote_types(hidden_SH.dtype, torch.float32)
        self.d_hidden: Tensor | None = None
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None

    def run(self, derivative: Derivative | None, trained: tuple[bool, ...] = ()) -> tuple[Tensor, Tensor]:
        """[N] log-probs and [N] entropies. `trained`: whether hidden states, weight and bias need a
        gradient."""
        targets = self._plan.targets
        logprobs_N = self._hidden.new_zeros(targets.ids_N.shape, dtype=self._wide)
        entropy_N = torch.zeros_like(logprobs_N)
        if derivative is not None and trained[0]:
            self.d_hidden = torch.empty_like(self._hidden)
        for sites, tokens in self._plan.chunks:
            logits_sV = nn.functional.linear(self._hidden[sites], self._weight, self._bias)
            rows = max(1, block_logits(logits_sV.device) // logits_sV.shape[1])
            starts = range(0, logits_sV.shape[0], rows)
            bounds = torch.searchsorted(
                targets.site_N[tokens] - sites.start,
                torch.tensor([*starts, logits_sV.shape[0]], device=targets.site_N.device),
            ).tolist()
            for i, start in enumerate(starts):
                block = logits_sV[start : start + rows]
                at = slice(sites.start + start, sites.start + start + block.shape[0])
                own = slice(tokens.start + bounds[i], tokens.start + bounds[i + 1])
                self._block(block, at, own, logprobs_N, entropy_N, derivative)
            if derivative is not None:
                self._accumulate(sites, logits_sV, trained)
        return logprobs_N, entropy_N

    def _block(
        self,
        logits_sV: Tensor,
        sites: slice,
        tokens: slice,
        logprobs_N: Tensor,
        entropy_N: Tensor,
        derivative: Derivative | None,
    ) -> None:
        """Scores of the tokens at a block of sites; with `derivative`, overwrite the logits with their
        gradient."""
        targets = self._plan.targets
        local_n, ids_n = targets.site_N[tokens] - sites.start, targets.ids_N[tokens]
        temperature_s = targets.temperature_S[sites, None].to(self._wide)
        logs_sV = logits_sV.to(self._wide)
        slope_sV = None
        if targets.softcap:
            logs_sV = (logs_sV / targets.softcap).tanh()
            slope_sV = 1 - logs_sV.square()
            logs_sV = logs_sV * targets.softcap
        if bool((temperature_s != 1).any()):
            logs_sV = logs_sV / temperature_s
        logs_sV = logs_sV.log_softmax(dim=-1)
        logprobs_N[tokens] = logs_sV[local_n, ids_n]
        entropy_s = None
        if self._plan.entropy or derivative is not None:
            probs_sV = logs_sV.exp()
            if self._plan.entropy:
                entropy_s = -torch.linalg.vecdot(probs_sV, logs_sV)
                entropy_N[tokens] = entropy_s[local_n]
        if derivative is None:
            return
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
        logits_sV.copy_(d_sV if slope_sV is None else d_sV.mul_(slope_sV))

    def _accumulate(self, sites: slice, d_sV: Tensor, trained: tuple[bool, ...]) -> None:
        _, weight, bias = trained
        hidden_sH = self._hidden[sites]
        if self.d_hidden is not None:
            torch.mm(d_sV, self._weight, out=self.d_hidden[sites])
        if bias and self._bias is not None:
            share_V = d_sV.sum(0, dtype=self._wide)
            self.d_bias = share_V if self.d_bias is None else self.d_bias + share_V
        if not weight:
            return
        if self.d_weight is None:
            self.d_weight = d_sV.t() @ hidden_sH
        elif self._wide == d_sV.dtype:
            self.d_weight.addmm_(d_sV.t(), hidden_sH)
        else:  # chunks add up in float32
            self.d_weight = self.d_weight.to(self._wide).add_(d_sV.t() @ hidden_sH)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients of hidden states, weight and bias, in the dtype of each."""
        made = (self.d_hidden, self.d_weight, self.d_bias)
        given = (self._hidden, self._weight, self._bias)
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
            ctx.made = None  # a second backward pass recomputes
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
    """True if equal up to rounding: vectorised and scalar code differ in the last bits."""
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
        if targets.softcap:
            logits_sV = (logits_sV / targets.softcap).tanh() * targets.softcap
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
