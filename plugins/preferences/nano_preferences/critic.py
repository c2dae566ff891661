"""The critic of PPO, generalised advantage estimation, and the scalar model of critics and reward models.

GAE: Schulman et al. 2016 (arXiv 1506.02438), over one chain of a rollout's sampled tokens, in the order in
which they were sampled; context tokens are not states, and the value after the last token is 0, also for a
rollout that hit a limit, since the limit is part of the task. The value loss is clipped:

    mean over sampled tokens of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.advantages import gae, whitened
from nano_rl.learn.batch import split_samples
from nano_rl.learn.config import OptimizerConfig, UpdateConfig
from nano_rl.learn.groups import Group, StepRow, TokenValues, TrainSample, to_samples
from nano_rl.learn.learner import Learner, prepare
from nano_rl.learn.logprob import backbone, row_states, shares_prefixes
from nano_shared.errors import GuardTripped
from nano_shared.lora import merge_adapter
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The rows of one rollout with the reward of each token."""

    rows: tuple[TrainSample, ...]
    """in the order of their `turn_ids_T`, or as given where they have none"""
    rewards: tuple[tuple[float, ...], ...]
    """[rows][L] the turn's reward on the last sampled token of each turn, 0 elsewhere"""

    @property
    def places(self) -> list[tuple[int, int]]:
        """Row and position of each sampled token, as they were sampled: a turn lies in one row."""
        return _places(self.rows)


def reward_chain(trajectory: Trajectory, turn_rewards: Sequence[float]) -> Chain:
    """Put the reward of each turn ([T]) on the last token sampled in that turn, or before it if it has none.
    Turns before the first trained token give no reward. Raises ValueError where the numbers of turns and
    rewards differ."""
    if (count := len(trajectory.turns)) != len(turn_rewards):
        raise ValueError(f"run {trajectory.id!r} has {count} turns and {len(turn_rewards)} turn rewards")
    rows = to_samples(trajectory, 0.0)
    rewards = [[0.0] * len(row.ids) for row in rows]
    last_of_turn = {rows[r].turn_ids_T[t]: (r, t) for r, t in _places(rows)}
    place = None
    for turn, reward in enumerate(turn_rewards):
        place = last_of_turn.get(turn, place)
        if place is not None:
            rewards[place[0]][place[1]] += reward
    return Chain(rows=tuple(rows), rewards=tuple(map(tuple, rewards)))


def _places(rows: Sequence[TrainSample]) -> list[tuple[int, int]]:
    sampled = ((r, t) for r, row in enumerate(rows) for t, m in enumerate(row.mask) if m)

    def when(place: tuple[int, int]) -> tuple[int, int, int]:
        r, t = place
        return rows[r].turn_ids_T[t] if rows[r].turn_ids_T else 0, r, t

    return sorted(sampled, key=when)


def chain_gae(
    chain: Chain, values: Sequence[Sequence[float]], *, discount: float, lam: float
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """[rows][L] advantages and returns, 0 on context; `values` of the state before each token."""
    places = chain.places
    rewards_N, values_N = ([of[r][t] for r, t in places] for of in (chain.rewards, values))
    advantages_N, returns_N = gae(rewards_N, values_N, discount=discount, lam=lam)

    def spread(numbers: Sequence[float]) -> list[tuple[float, ...]]:
        rows = [[0.0] * len(row.ids) for row in chain.rows]
        for (r, t), number in zip(places, numbers, strict=True):
            rows[r][t] = number
        return [tuple(row) for row in rows]

    return spread(advantages_N), spread(returns_N)


class ScalarModel(nn.Module):
    """A causal backbone and a linear head in float32, initialised to 0."""

    def __init__(self, lm: nn.Module, *, bias: bool) -> None:
        """`lm` is a causal LM, bare or under PEFT, and is not copied; its language head is not used."""
        super().__init__()
        config: Any = lm.config
        self.lm = lm.eval()
        self.head = nn.Linear(config.hidden_size, 1, bias=bias).to(next(lm.parameters()).device)
        nn.init.zeros_(self.head.weight)
        if bias:
            nn.init.zeros_(self.head.bias)

    @property
    def causal(self) -> Any:
        lm: Any = self.lm
        return lm.get_base_model() if hasattr(lm, "peft_config") else lm

    @property
    def backbone(self) -> Any:
        return backbone(self.causal)

    def forward(self, ids_BT: Tensor, attention_BT: Tensor) -> Tensor:
        """[B, T] float32 score of the state after each token; arbitrary in the padding on the right."""
        states_MH, node_BT = row_states(self.causal, ids_BT, attention_BT)
        worth_M: Tensor = self.head(states_MH.to(self.head.weight.dtype)).squeeze(-1)
        return worth_M[node_BT]


def scalar_model(policy: Any, *, lora_rank: int, seed: int, bias: bool) -> ScalarModel:
    """A scalar model initialised from a copy of the policy's weights, with an adapter merged. All weights are
    trained, or a new adapter, by default of the rank of the policy's."""
    adapters = getattr(policy, "peft_config", None)
    if adapters and not lora_rank:
        lora_rank = int(adapters["default"].r)
    lm: Any = copy.deepcopy(policy)
    if adapters:
        lm, _ = merge_adapter(lm)
    lm.requires_grad_(False)
    # the language head is not used and must not be trained
    lm.set_output_embeddings(nn.Identity())
    return ScalarModel(prepare(lm, lora_rank=lora_rank, seed=seed), bias=bias)


def by_budget(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of micro-batches of at most `max_tokens` padded positions, longest first, one at least."""
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > max_tokens:
            parts.append([])
        parts[-1].append(index)
    return parts


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueBatch:
    """B rows padded to T tokens; position t belongs to the state *before* token t."""

    ids_BT: Tensor
    attention_BT: Tensor
    mask_BT: Tensor
    returns_BT: Tensor
    old_BT: Tensor
    num_tokens: int
    """sampled tokens of the whole update: the denominator of the value loss"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticTerms:
    gae_lambda: float = 1.0
    """lambda of GAE, per sampled token: 1 uses the returns alone, 0 the critic's next value; below 1 the
    critic must be better than it becomes in tens of steps"""
    value_clip: float | None = 0.2
    """clip the change of each value in a step to this; None: no clipping"""
    whiten: bool = True
    """normalise advantages to mean 0 and standard deviation 1 over the sampled tokens of a step"""
    learning_rate: float = 1e-4


class Critic:
    """A separate value model with its own optimizer; it may use twice the memory of the policy."""

    def __init__(
        self, policy: nn.Module, *, steps: int, lora_rank: int, max_tokens: int, seed: int,
        terms: CriticTerms = CriticTerms(),
    ) -> None:  # fmt: skip
        """Start from a copy of the policy's weights. `steps` is the length of the learning-rate schedule,
        `max_tokens` the bound of a micro-batch. To resume, call `load_state_dict` afterwards."""
        self.terms = terms
        self.model: ScalarModel = scalar_model(policy, lora_rank=lora_rank, seed=seed, bias=True)
        self._learner = Learner(self.model, OptimizerConfig(learning_rate=terms.learning_rate), steps=steps)
        self._max_tokens = max_tokens
        self._device = next(self.model.parameters()).device

    @torch.no_grad()
    def values(self, samples: Sequence[TrainSample]) -> list[TokenValues]:
        """[rows][L] the value of the state before each sampled token; 0 on other tokens."""
        values: list[TokenValues] = [()] * len(samples)
        for indices in self._split(samples):
            rows = [samples[i] for i in indices]
            ids_BT, attention_BT, mask_BT = self._inputs(rows)
            values_BT = value_of(self.model, ids_BT, attention_BT) * mask_BT
            for i, sample, row in zip(indices, rows, values_BT.tolist(), strict=True):
                values[i] = tuple(row[: len(sample.ids)])
        return values

    def rows(self, chains: Sequence[Chain]) -> list[list[StepRow]]:
        """[rollouts][rows] the rows with advantages by GAE, with `whiten` normalised over all of them."""
        values = iter(self.values([row for chain in chains for row in chain.rows]))
        samples, advantages, returns, old = [], [], [], []
        for chain in chains:
            of_chain = [next(values) for _ in chain.rows]
            a, r = chain_gae(chain, of_chain, discount=1.0, lam=self.terms.gae_lambda)
            samples += chain.rows
            old += of_chain
            advantages += a
            returns += r
        if self.terms.whiten:
            advantages = whitened(advantages, [sample.mask for sample in samples])
        critic_rows = iter(
            StepRow(sample=replace(s, advantages_T=a), returns=r, values=v)
            for s, a, r, v in zip(samples, advantages, returns, old, strict=True)
        )
        return [[next(critic_rows) for _ in chain.rows] for chain in chains]

    def group_rows(
        self, groups: Sequence[Group], turn_rewards: Sequence[Sequence[Sequence[float] | None]]
    ) -> list[list[StepRow]]:
        """[groups] the rows of each, given the reward of each turn; rollouts without one are left out."""
        pairs = [
            zip(group.trajectories, of, strict=True) for group, of in zip(groups, turn_rewards, strict=True)
        ]
        chains = [[reward_chain(run, given) for run, given in of if given is not None] for of in pairs]
        rows = iter(self.rows([chain for of_group in chains for chain in of_group]))
        return [[row for _ in of_group for row in next(rows)] for of_group in chains]

    def update(self, critic_rows: Sequence[StepRow], *, ends_step: bool) -> dict[str, float]:
        """One optimizer step. Raises GuardTripped, weights unchanged, if loss or gradient is not finite."""
        batches = self._batches(critic_rows)
        metrics = self._learner.update(batches, self._objective, _finite, ends_step=ends_step)
        named = {"value_loss": "loss", "value_clipped": "value_clipped", "value_grad_norm": "grad_norm"}
        return {ours: metrics[name] for ours, name in named.items()}

    def explained(self, rows: Sequence[StepRow]) -> dict[str, float]:
        return explained_variance(rows)

    def state_dict(self) -> dict[str, Any]:
        return self._learner.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learner.restore(state_dict)

    def _batches(self, critic_rows: Sequence[StepRow]) -> list[ValueBatch]:
        count = sum(row.sample.num_action_tokens for row in critic_rows)
        batches = []
        for indices in self._split([row.sample for row in critic_rows]):
            rows = [critic_rows[i] for i in indices]
            ids_BT, attention_BT, mask_BT = self._inputs([row.sample for row in rows])
            of_rows = [[row.returns for row in rows], [row.values for row in rows]]
            returns_BT, old_BT = (padded(of, torch.float32).to(self._device) for of in of_rows)
            batches.append(ValueBatch(
                ids_BT=ids_BT, attention_BT=attention_BT, mask_BT=mask_BT, returns_BT=returns_BT,
                old_BT=old_BT, num_tokens=count,
            ))  # fmt: skip
        return batches

    def _split(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        """Row indices of each micro-batch; rows with a shared prefix together if the model can merge them."""
        return split_samples(samples, max_tokens=self._max_tokens, trees=shares_prefixes(self.model.causal))

    def _inputs(self, rows: Sequence[TrainSample]) -> tuple[Tensor, Tensor, Tensor]:
        ids_BT = padded([row.ids for row in rows], torch.int64)
        attention_BT = padded([[1] * len(row.ids) for row in rows], torch.int64)
        mask_BT = padded([row.mask for row in rows], torch.bool)
        return ids_BT.to(self._device), attention_BT.to(self._device), mask_BT.to(self._device)

    def _objective(self, model: nn.Module, batch: ValueBatch) -> tuple[Tensor, dict[str, float]]:
        values_BT = value_of(model, batch.ids_BT, batch.attention_BT)
        values_N, returns_N, old_N = (of[batch.mask_BT] for of in (values_BT, batch.returns_BT, batch.old_BT))
        loss_N, clipped_N = value_loss(values_N, returns_N, old_N, clip=self.terms.value_clip)
        loss = loss_N.sum() / max(batch.num_tokens, 1)
        sums = {"tokens": float(values_N.numel()), "value_clipped": clipped_N.double().sum().item()}
        return loss, {"loss": loss.item(), **sums}


def open_critic(policy: nn.Module, config: UpdateConfig) -> Critic:
    return Critic(
        policy, steps=config.steps, lora_rank=config.lora_rank, max_tokens=config.max_tokens, seed=config.seed
    )


def value_of(model: nn.Module, ids_BT: Tensor, attention_BT: Tensor) -> Tensor:
    """[B, T] the value of the state before each token; 0 at the first token."""
    after_BT: Tensor = model(ids_BT, attention_BT)
    return torch.cat([torch.zeros_like(after_BT[:, :1]), after_BT[:, :-1]], dim=1)


def value_loss(
    values_N: Tensor, returns_N: Tensor, old_N: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """[N] half the larger squared error, plain or clipped, and [N] whether that is the clipped one."""
    plain_N = (values_N - returns_N).square()
    if clip is None:
        return plain_N / 2, torch.zeros_like(plain_N, dtype=torch.bool)
    bounded_N = old_N + (values_N - old_N).clamp(-clip, clip)
    clipped_N = (bounded_N - returns_N).square()
    return torch.maximum(plain_N, clipped_N) / 2, clipped_N > plain_N


def explained_variance(rows: Sequence[StepRow]) -> dict[str, float]:
    """`value_mean`, `return_mean` and `value_explained` = 1 - Var(R - V) / Var(R), over sampled tokens, with
    the values at the start of the step. The last is absent if all returns are equal."""
    masked = (of for row in rows for of in zip(row.values, row.returns, row.sample.mask, strict=True))
    pairs = [(value, reached) for value, reached, m in masked if m]
    if not pairs:
        return {}
    values, returns = zip(*pairs, strict=True)
    count = len(pairs)
    metrics = {"value_mean": math.fsum(values) / count, "return_mean": math.fsum(returns) / count}
    spread = _variance([r for _, r in pairs])
    if spread > 0:
        metrics["value_explained"] = 1 - _variance([r - v for v, r in pairs]) / spread
    return metrics


def _variance(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / len(numbers)
    return math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)


def _finite(metrics: dict[str, float]) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            raise GuardTripped(
                f"the critic's {name} is {metrics[name]}; go on from an earlier state, or look at"
                " the rewards of this step"
            )
