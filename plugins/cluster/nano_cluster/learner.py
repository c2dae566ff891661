"""A learner whose weights, gradients and optimizer are sharded over ranks by FSDP2.

Rank 0 runs the training as one process does, on a whole copy of the weights that samples and scores. It
gives each rank its share of an update's micro-batches and takes back their metrics, so that one rank decides
what is skipped, stopped and saved. Ranks that roll out too have a copy as well, which scores its share of old
and reference log-probs. After each update the copies are written from the shards.

The weights of a loss are those of the whole step (`Batch.weight_BT`), and FSDP averages gradients over ranks:
each loss is multiplied by their number. A rank with fewer micro-batches than another runs ones that weigh
nothing, since every pass is a collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from nano_cluster.rank_rollouts import (
    HAND_IN,
    ROLL_OUT,
    FollowingRollouts,
    LeadingRollouts,
)
from nano_cluster.ranks import JOIN, Ranks, local_rank, lost_explained, run_rank
from nano_cluster.ranks import leader as leader
from nano_cluster.shards import check_shards, load_shards, save_shards
from nano_coder.config import load_config
from nano_coder.models.opening import open_weights
from nano_rl.config import TrainConfig
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.learner import BatchLoss, Guard, Learner, LossPart, Reference, prepare, with_weights
from nano_rl.learn.logprob import can_share, layers_of, token_logprobs
from nano_rl.learn.loss import mean_metrics
from nano_rl.learn.train_step import PolicyLoss
from nano_shared.errors import CheckpointError, ConfigError, GuardTripped
from nano_shared.process import unmap_freed_memory
from nano_shared.settings import parse_config

_PREFIX = "model."
"""of the names of weights under `_Root`"""
_UPDATE, _SCORE, _SAVE, _LOAD = "update", "score", "save", "load"


class _Root(nn.Module):
    """Gives the model to a loss, between FSDP's hooks: what is outside the layers is whole inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: BatchLoss, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return loss(self.model, batch)


def shard_model(model: nn.Module, device: str, size: int, *, offload: bool = False) -> nn.Module:
    """The model sharded over all ranks in place, layer by layer, called with a loss and a batch. Trained
    weights of less than float32 become float32 shards, and are rounded where they are gathered."""
    can_share(model)  # tested and remembered while the weights are whole
    narrow = {p.dtype for p in model.parameters() if p.is_floating_point() and torch.finfo(p.dtype).bits < 32}
    if len(narrow) > 1:
        raise ConfigError(f"the weights are of {sorted(map(str, narrow))}: ranks need one precision")
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in narrow:
            parameter.data = parameter.data.float()
    precision = MixedPrecisionPolicy()
    if narrow:
        precision = MixedPrecisionPolicy(param_dtype=narrow.pop(), reduce_dtype=torch.float32)
    how: dict[str, Any] = {
        "mesh": init_device_mesh(device, (size,)),
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if offload else OffloadPolicy(),
    }
    root = _Root(model)
    for layer in layers_of(model):
        fully_shard(layer, **how)
    fully_shard(root, **how)
    root.set_reduce_scatter_unused_params(True)  # a rank whose rows leave out a weight reduces zeros for it
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank does of an update."""

    work: list[tuple[int, Batch, BatchLoss]]
    """micro-batches with their index in the update"""
    passes: int
    """of every rank, those without a micro-batch included"""
    ends_step: bool


_Result = tuple[int, dict[str, float], Tensor | None]
"""index of a micro-batch, its metrics, and its log-probs if they are of rollouts"""


class RankedReference(Reference):
    """A reference on each rank that has a copy of the weights."""

    def __init__(self, learner: ShardedLearner) -> None:
        super().__init__(learner.model)
        self._learner = learner

    def score(self, batches: Sequence[Batch]) -> list[Batch]:
        scored = zip(batches, self._learner.logprobs(batches, reference=True), strict=True)
        return [batch.with_reference(logprobs_BT) for batch, logprobs_BT in scored]

    def weights(self) -> AbstractContextManager[None]:
        return with_weights(self._model, self._start)


class ShardedLearner(Learner):
    """One rank's part of the learner; rank 0's is the learner of the training."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, config: OptimizerConfig, *, steps: int, shards: Path,
        whole: nn.Module | None = None, copies: int = 1, offload: bool = False,
    ) -> None:  # fmt: skip
        """`model` is sharded in place; `whole` is a copy of it, which so many ranks from rank 0 on have;
        `shards` holds the saved ones."""
        self._device = next(model.parameters()).device  # offloaded shards are elsewhere
        self._root = shard_model(model, self._device.type, ranks.size, offload=offload)
        super().__init__(self._root, config, steps=steps)
        if self._device.type == "cpu":
            unmap_freed_memory()
        self._ranks, self._shards, self._copies = ranks, shards, copies
        self._reference: RankedReference | None = None
        self._whole = dict(whole.named_parameters()) if whole is not None else {}
        if whole is not None:
            self.model = whole
        self._check_alike()

    def update_parts(
        self, work: Sequence[LossPart], guard: Guard, *, ends_step: bool = True
    ) -> dict[str, float]:
        size = self._ranks.size
        numbered = [(index, batch, _unobserved(loss)) for index, (batch, loss) in enumerate(work)]
        passes = -(-len(numbered) // size)
        shares = [
            _Share(work=numbered[rank::size], passes=passes, ends_step=ends_step) for rank in range(size)
        ]
        self._ranks.order(_UPDATE)
        own = self._ranks.scatter(shares)

        def decide(results: list[_Result], values: dict[str, float]) -> None:
            ordered = sorted(results, key=lambda result: result[0])
            values |= mean_metrics(metrics for _, metrics, _ in ordered)
            for (batch, loss), (_, _, logprobs_BT) in zip(work, ordered, strict=True):
                if isinstance(loss, PolicyLoss) and loss.on_logprobs and logprobs_BT is not None:
                    loss.on_logprobs(batch, logprobs_BT)
            guard(values)

        return self._update_share(own, decide)

    def reference(self) -> Reference:
        self._reference = RankedReference(self)
        return self._reference

    def logprobs(self, batches: Sequence[Batch], *, reference: bool = False) -> list[Tensor]:
        """As Learner; of the `reference` on request."""
        numbered, copies = list(enumerate(batches)), self._copies
        if copies == 1:
            return [logprobs_BT for _, logprobs_BT in self._score(numbered, reference)]
        self._ranks.order(_SCORE, reference=reference)
        shares = [numbered[rank::copies] if rank < copies else [] for rank in range(self._ranks.size)]
        gathered = self._gathered_scores(self._ranks.scatter(shares), reference) or []
        found = dict(scored for of_rank in gathered for scored in of_rank)
        return [found[index].to(self._device) for index, _ in numbered]

    def _gathered_scores(self, share: list[tuple[int, Batch]], reference: bool) -> list[Any] | None:
        scored = self._score(share, reference)
        return self._ranks.gather([(index, logprobs_BT.cpu()) for index, logprobs_BT in scored])

    @torch.no_grad()
    def _score(self, share: list[tuple[int, Batch]], reference: bool) -> list[tuple[int, Tensor]]:
        with self._reference.weights() if reference and self._reference else nullcontext():
            return [(index, token_logprobs(self.model, batch)) for index, batch in share]

    def follow(self, order: str, told: dict[str, Any]) -> None:
        """Do what rank 0 orders."""
        if order == _UPDATE:
            with suppress(GuardTripped):  # rank 0 says why
                self._update_share(self._ranks.scatter())
        elif order == _SCORE:
            self._gathered_scores(self._ranks.scatter(), told["reference"])
        elif order == _SAVE:
            save_shards(self._shards / told["name"], self._trained, self._optimizer, self._ranks)
        elif order == _LOAD:
            self._load(told)

    def _update_share(
        self, share: _Share, decide: Callable[[list[_Result], dict[str, float]], None] | None = None
    ) -> dict[str, float]:
        """One update by all ranks. `decide` is rank 0's: it completes the metrics with the results of all
        ranks, and raises GuardTripped to leave the weights as they are."""
        results: list[_Result] = []
        parts: list[LossPart] = [
            (batch, partial(self._loss, index, loss, results)) for index, batch, loss in share.work
        ]
        parts += [(_nothing(), self._no_loss)] * (share.passes - len(parts))

        def guard(values: dict[str, float]) -> None:
            gathered = self._ranks.gather(results)
            if decide is None or gathered is None:
                if not self._ranks.agree():
                    raise GuardTripped("rank 0 stopped the update")
                return
            applied = False
            try:
                decide([result for of_rank in gathered for result in of_rank], values)
                applied = True
            finally:
                self._ranks.agree(applied)

        with lost_explained():
            values = super().update_parts(parts, guard, ends_step=share.ends_step)
            self._publish()
        return values

    def _loss(
        self, index: int, loss: BatchLoss, results: list[_Result], _: nn.Module, batch: Batch
    ) -> tuple[Tensor, dict[str, float]]:
        seen: list[Tensor] = []
        if isinstance(loss, PolicyLoss):
            loss = replace(loss, on_logprobs=lambda _, logprobs_BT: seen.append(logprobs_BT.cpu()))
        value, metrics = self._root(loss, batch.to(self._device))
        results.append((index, metrics, seen[0] if seen else None))
        return value * self._ranks.size, metrics

    def _no_loss(self, _: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        value, _metrics = self._root(_zero, batch.to(self._device))
        return value, {}

    @torch.no_grad()
    def _publish(self) -> None:
        """Write the copy, if this rank has one, from the shards of all."""
        for name, weight in self._trained.items():
            gathered = weight.full_tensor()  # type: ignore[attr-defined]
            if self._whole:
                self._whole[name.removeprefix(_PREFIX)].copy_(gathered)

    @torch.no_grad()
    def _check_alike(self) -> None:
        """Raises ConfigError if the ranks did not begin from the same trained weights."""
        alike = True
        for name, weight in self._trained.items():
            gathered = weight.full_tensor()  # type: ignore[attr-defined]
            if self._whole:
                own = self._whole[name.removeprefix(_PREFIX)]
                alike &= torch.equal(gathered.to(own), own)
        votes = self._ranks.gather(alike)
        if not self._ranks.agree(votes is not None and all(votes)):
            raise ConfigError(
                "the ranks began from different weights: give all machines the same model files"
            )

    def state(self) -> dict[str, Any]:
        """The state of rank 0 with the name of the folder of shards, which all ranks write now."""
        name = f"{self.step:08d}"
        self._ranks.order(_SAVE, name=name)
        written = save_shards(self._shards / name, self._trained, self._optimizer, self._ranks)
        return {
            "step": self.step,
            "weights": {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad},
            "shards": {"name": name, **written},
            "attached": {name: part.state_dict() for name, part in self._attached.items()},
        }

    def restore(self, state: Any) -> None:
        """Continue from `state()`, saved by any number of ranks."""
        if "shards" not in state:
            raise CheckpointError(
                "the saved state is that of a training in one process: go on with `nano-rl train`, or start"
                " under another --name"
            )
        shards = state["shards"]
        check_shards(self._shards / shards["name"], shards["files"])
        self._ranks.order(_LOAD, step=state["step"], **shards)
        self._load({"step": state["step"], **shards})
        for name, part in self._attached.items():
            part.load_state_dict(state["attached"][name])

    def _load(self, told: dict[str, Any]) -> None:
        load_shards(self._shards / told["name"], self._trained, self._optimizer, told["counts"])
        self.step = told["step"]
        self._publish()


def _unobserved(loss: BatchLoss) -> BatchLoss:
    return replace(loss, on_logprobs=None) if isinstance(loss, PolicyLoss) else loss


def _zero(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    return token_logprobs(model, batch).sum() * 0, {}


def _nothing() -> Batch:
    """A row with one trained token, so that each weight has a gradient."""
    row = TrainSample(
        run_id="", ids=(0, 0), mask=(0, 1), logprobs=(0.0, 0.0), versions=(0, 0), advantage=0.0,
        temperature=1.0,
    )  # fmt: skip
    return make_batches([row], max_tokens=2)[0]


def open_sharded(
    ranks: Ranks, name: str, settings: TrainConfig, folder: Path, model: nn.Module, config: OptimizerConfig,
    *, steps: int,
) -> ShardedLearner:  # fmt: skip
    """The learner of rank 0; all ranks open model `name`. `folder`, of the training, all reach."""
    if settings.quantise or settings.logs.lambda_preference:
        raise ConfigError(
            "a training on several ranks takes neither `quantise` nor `logs.lambda_preference`: leave them"
            " out, or train in one process"
        )
    device = next(model.parameters()).device.type
    ranks.order(JOIN, model=name, config=settings.model_dump(mode="json"), folder=str(folder), device=device)
    ranks.join(device)
    copies = settings.rollout_ranks(ranks.size)
    learner = ShardedLearner(
        ranks, copy.deepcopy(model), config, steps=steps, shards=folder / SHARDS, whole=model, copies=copies,
        offload=settings.offload,
    )  # fmt: skip
    if copies > 1:
        learner.roll_out = LeadingRollouts(ranks, copies).collect
    return learner


SHARDS = "shards"
"""folder name in the folder of a training"""


def run_ranks(command: Callable[[], None]) -> None:
    """Run the command line on rank 0; the others follow what it trains."""
    run_rank(command, follow)


def follow(ranks: Ranks) -> None:
    """A rank other than 0: open the model, and do what rank 0 orders until it leaves."""
    learner: ShardedLearner | None = None
    for order, told in ranks.orders():
        if order == JOIN:
            learner, rollouts = _joined(ranks, told)
        elif order in (ROLL_OUT, HAND_IN):
            rollouts.follow(order)
        elif learner is not None:
            learner.follow(order, told)


def _joined(ranks: Ranks, told: dict[str, Any]) -> tuple[ShardedLearner, FollowingRollouts]:
    config = parse_config(TrainConfig, told["config"])
    ranks.join(told["device"])
    where = f"cuda:{local_rank()}" if told["device"] == "cuda" else "cpu"
    kv_gib = load_config({}, Path())[0].kv_gib
    opened = open_weights(told["model"], dtype=config.dtype, device=where, kv_gib=kv_gib)
    model = prepare(
        opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip
    copies = config.rollout_ranks(ranks.size)
    whole = copy.deepcopy(model) if ranks.rank < copies else None
    learner = ShardedLearner(
        ranks, model, config.optimizer, steps=config.steps, shards=Path(told["folder"]) / SHARDS,
        whole=whole, copies=copies, offload=config.offload,
    )  # fmt: skip
    if whole is not None and config.objective.terms.needs_reference:
        learner.reference()
    opened = replace(opened, loaded=replace(opened.loaded, model=learner.model))
    return learner, FollowingRollouts(ranks, opened, config)
