"""KL to the reference from sampled tokens (Schulman 2020), in the loss or in the reward.

Right *values* in expectation: k1, k3. Right *gradients* as a loss on-policy: k2 and k3+; k1's is zero in
expectation, k3's is that of the forward KL. In the reward only k1 is right: an estimator that depends on the
policy has a gradient of its own, which a reward leaves out, and k1's alone is zero in expectation.
"""

from __future__ import annotations

from torch import Tensor

from nano_rl.objectives.config import KL
from nano_rl.objectives.ratio import clamped_exp, sums_to_the_end


def reference_kl(new_N: Tensor, reference_N: Tensor, kind: KL) -> Tensor:
    """[N] per-token estimate of KL(new || reference) from tokens of `new`."""
    log_ratio_N = new_N - reference_N
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return log_ratio_N.square() / 2
    k3_N = clamped_exp(-log_ratio_N) - 1 + log_ratio_N
    if kind == "k3":
        return k3_N
    k2_N = log_ratio_N.square() / 2
    return k2_N - k2_N.detach() + k3_N.detach()


def less_kl(advantages_N: Tensor, kl_N: Tensor, row_N: Tensor, beta: float) -> Tensor:
    """[N] advantages where each token is charged with its own KL and that of all after it in its row."""
    return advantages_N - beta * sums_to_the_end(kl_N.detach(), row_N)
