"""Run by torchrun on each rank (test_ranks.py): what sharded learners do, against one in one process.

on_ranks.py [RANKS] ...      without torchrun
on_ranks.py exact [CASE ...] loss, gradients and weights of an update, as JSON by case
on_ranks.py save FOLDER      two updates, saved
on_ranks.py load FOLDER      restored by another number of ranks, compared, and saved again
on_ranks.py rollouts FOLDER  two steps from rollouts of a tiny model on: runs, loss and weights
on_ranks.py RANKS failing FOLDER full|killed|slow  rollouts, of which those of the last rank fail
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from looping import CONFIG, TASKS, parity, runtime_at, scored
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nano_cluster.learner import ShardedLearner
from nano_cluster.rank_rollouts import (
    HAND_IN,
    ROLL_OUT,
    FollowingRollouts,
    LeadingRollouts,
    RolloutShare,
    deal,
)
from nano_cluster.ranks import LEAVE, Ranks
from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_coder.run.execution import Runtime
from nano_rl.gather.rollouts import RollOut, collect
from nano_rl.learn.advantages import group_samples
from nano_rl.learn.batch import make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.groups import TrainSample, form_groups
from nano_rl.learn.learner import Learner, LossPart, Reference, prepare
from nano_rl.learn.objectives import RECIPE
from nano_rl.learn.train_step import PolicyLoss
from nano_shared.errors import LogError, NanoError
from nano_shared.types import Trajectory

torch.set_num_threads(1)
VOCABULARY = 61
RATE = OptimizerConfig(learning_rate=1e-2)
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "untied": {"tied": False},
    "an adapter, recomputed": {"lora_rank": 4, "gradient_checkpointing": True},
    "all weights, recomputed": {"gradient_checkpointing": True},
    "independent rows": {"window": 64},
    "one micro-batch": {"max_tokens": 4096},
    "a micro-batch without trained tokens": {"tied": False, "untrained": True},
    "offloaded": {"offload": True, "lora_rank": 4},
}


def model_of(case: dict[str, Any]) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 44, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": case.get("tied", True),
        "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(5)
    if window := case.get("window"):
        model: nn.Module = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    chosen = {name: case.get(name, 0) for name in ("lora_rank", "gradient_checkpointing")}
    trained = prepare(model.double(), seed=3, **chosen).double()
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if "lora_B" in name:  # at zero the gradient of the other factor would be zero
                weight.normal_(std=0.1)
    return trained


def rows(number: int = 11) -> list[TrainSample]:
    """Rows of three families with shared prefixes, of 6 to 40 tokens."""
    draw = Random(7)
    prefixes = [[draw.randrange(VOCABULARY) for _ in range(size)] for size in (4, 18, 9)]
    made = []
    for place in range(number):
        prompt = prefixes[place % 3]
        ids = (*prompt, *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(2, 22))))
        mask = tuple(int(at >= len(prompt)) for at in range(len(ids)))
        made.append(
            TrainSample(
                run_id=f"run-{place}",
                ids=ids,
                mask=mask,
                versions=(0,) * len(ids),
                temperature=1.0,
                logprobs=tuple(-4.0 * m for m in mask),
                advantage=draw.uniform(-1, 1),
            )
        )
    return made


def work_of(case: dict[str, Any], seen: list[Any]) -> list[LossPart]:
    trees = "window" not in case
    batches = make_batches(rows(), max_tokens=case.get("max_tokens", 60), dtype=torch.float64, trees=trees)
    if case.get("untrained"):
        batches[1] = copy.copy(batches[1])
        for column in (batches[1].mask_BT, batches[1].weight_BT, batches[1].advantages_BT):
            column.zero_()
    objective = RECIPE.with_terms(tis_cap=None)
    loss = PolicyLoss(objective=objective, on_logprobs=lambda batch, lp: seen.append((batch.run_ids, lp)))
    return [(batch, loss) for batch in batches]


def sharded(ranks: Ranks, case: dict[str, Any], folder: Path) -> ShardedLearner:
    model = model_of(case)
    whole = copy.deepcopy(model) if ranks.rank == 0 else None
    return ShardedLearner(
        ranks, model, RATE, steps=9, shards=folder, whole=whole, offload=case.get("offload", False)
    )


def full(learner: ShardedLearner) -> dict[str, torch.Tensor]:
    """Weights and moments, gathered; all ranks call it."""
    found = {}
    for name, weight in learner._trained.items():
        found[name.removeprefix("model.")] = weight.detach().full_tensor()  # type: ignore[attr-defined]
        for moment, value in learner._optimizer.state[weight].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{moment}/{name.removeprefix('model.')}"] = whole
    return found


def lead_or_follow(ranks: Ranks, learner: ShardedLearner, lead: Any) -> Any:
    """`lead` on rank 0, its orders on the others."""
    if ranks.rank:
        for order, told in ranks.orders():
            learner.follow(order, told)
        return None
    try:
        return lead()
    finally:
        ranks.order(LEAVE)


def exact(ranks: Ranks, *names: str) -> dict[str, Any]:
    told = {}
    for name, case in ((name, CASES[name]) for name in names or CASES):
        learner = sharded(ranks, case, Path("unused"))
        ours: list[Any] = []
        theirs: list[Any] = []

        def lead(case: dict[str, Any] = case, learner: ShardedLearner = learner, ours: Any = ours) -> Any:
            return learner.update_parts(work_of(case, ours), lambda _: None)

        got = lead_or_follow(ranks, learner, lead)
        state = full(learner)
        if ranks.rank:
            continue
        plain = Learner(model_of(case), RATE, steps=9)
        expected = plain.update_parts(work_of(case, theirs), lambda _: None)
        gaps = {"weights": 0.0, "copy": 0.0, "gradients": 0.0, "logprobs": 0.0}
        copied = dict(learner.model.named_parameters())
        for weight, value in plain._trained.items():
            moments = plain._optimizer.state[value]
            gap = (moments["exp_avg"] - state[f"exp_avg/{weight}"]).abs().max() * 10  # beta_1 is 0.9
            gaps["gradients"] = max(gaps["gradients"], gap.item())
            gaps["weights"] = max(gaps["weights"], (value - state[weight]).abs().max().item())
            gaps["copy"] = max(gaps["copy"], (copied[weight] - state[weight]).abs().max().item())
        for (run_ids, one), (same_ids, other) in zip(ours, theirs, strict=True):
            assert run_ids == same_ids
            gaps["logprobs"] = max(gaps["logprobs"], (one - other).abs().max().item())
        told[name] = {
            "gaps": gaps, "metrics": max(abs(got[key] - expected[key]) for key in expected),
            "same_metrics": sorted(got) == sorted(expected), "grad_norm": expected["grad_norm"],
            "micro_batches": len(ours), "step": learner.step,
        }  # fmt: skip
    return told


def save(ranks: Ranks, folder: Path) -> dict[str, Any]:
    case = {"lora_rank": 3} if (folder / "adapter").exists() else {}
    learner = sharded(ranks, case, folder / "training" / "shards")

    def lead() -> dict[str, Any]:
        for _ in range(2):
            learner.update_parts(work_of(case, []), lambda _: None)
        return learner.state()

    return _keep(ranks, learner, lead_or_follow(ranks, learner, lead), folder)


def load(ranks: Ranks, folder: Path) -> dict[str, Any]:
    case = {"lora_rank": 3} if (folder / "adapter").exists() else {}
    learner = sharded(ranks, case, folder / "training" / "shards")
    with torch.no_grad():  # nothing of what was there may stay
        for weight in learner._trained.values():
            weight.fill_(0.5)

    def lead() -> dict[str, Any]:
        learner.restore(torch.load(folder / "state.pt"))
        return learner.state()

    state = lead_or_follow(ranks, learner, lead)
    found, expected = full(learner), torch.load(folder / "full.pt")
    equal = {name for name in found if torch.equal(found[name], expected[name])}
    told = {"equal": len(equal), "of": len(expected), "differ": sorted(found.keys() ^ expected.keys())}
    if ranks.rank == 0:
        own = dict(learner.model.named_parameters())
        told["copied"] = all(torch.equal(own[n], expected[n]) for n, p in own.items() if p.requires_grad)
    return {**told, **_keep(ranks, learner, state, folder)}


def _keep(ranks: Ranks, learner: ShardedLearner, state: Any, folder: Path) -> dict[str, Any]:
    found = full(learner)
    if ranks.rank == 0:
        torch.save(found, folder / "full.pt")
        torch.save(state, folder / "state.pt")
    return {"step": learner.step, "tensors": len(found)}


def opened_at(folder: Path) -> OpenedWeights:
    """The tiny model of the folder in float64, trainable."""
    opened = open_weights(str(folder / "tiny"))
    model = prepare(opened.loaded.model.double(), lora_rank=0, seed=0)
    return replace(opened, loaded=replace(opened.loaded, model=model))


def rounded(opened: OpenedWeights) -> OpenedWeights:
    """Its weights in float32, which the engine decodes."""
    model = copy.deepcopy(opened.loaded.model).float()
    return replace(opened, loaded=replace(opened.loaded, model=model))


def live(opened: OpenedWeights, log: Path, version: int) -> Runtime:
    given = rounded(opened)
    policy = local_policy(given.loaded, given.profile, version=version, scheduler="lockstep")
    return replace(runtime_at(log), policy=policy)


class Rounded(FollowingRollouts):
    def _roll_out(self, share: RolloutShare) -> list[Trajectory]:
        trained, self._opened = self._opened, rounded(self._opened)
        try:
            return super()._roll_out(share)
        finally:
            self._opened = trained


def step_of(
    learner: Learner, reference: Reference, opened: OpenedWeights, log: Path, roll_out: RollOut
) -> dict[str, Any]:
    """Roll out five tasks of three runs, score them under current weights and reference, and learn."""
    runtime = live(opened, log, learner.step)
    seen: list[str] = []
    with runtime.store:
        runs = roll_out(
            TASKS, runtime, group_size=3, seed=learner.step, on_run=lambda run: seen.append(run.id)
        )
        assert all(runtime.store.get(run.id).turns == run.turns for run in runs)
        assert len(runtime.store.runs()) == 15 * (learner.step + 1)
    assert seen == [run.id for run in runs]
    groups = form_groups(scored(run, parity(run)) for run in runs)
    samples = [sample for group in groups for sample in group_samples(group)]
    batches = make_batches(samples, max_tokens=150, dtype=torch.float64)
    loss = PolicyLoss(objective=RECIPE.with_terms(tis_cap=None, beta=0.05))
    old = learner.logprobs(batches)
    assert len(batches) > 2, len(batches)
    batches = [
        batch.with_old(logprobs_BT) for batch, logprobs_BT in zip(reference.score(batches), old, strict=True)
    ]
    metrics = learner.update([*batches], loss, lambda _: None)
    return {
        "keys": [(run.task.key, run.seed) for run in runs],
        "tokens": [(sample.ids, sample.mask) for sample in samples],
        "logprobs": [value for sample in samples for value in sample.logprobs],
        "versions": [sample.versions for sample in samples],
        "scores": [logprobs_BT for batch in batches
                   for logprobs_BT in (batch.old_logprobs_BT, batch.reference_logprobs_BT)],
        "loss": metrics["loss"], "grad_norm": metrics["grad_norm"],
    }  # fmt: skip


def ranked(ranks: Ranks, folder: Path) -> tuple[ShardedLearner, OpenedWeights]:
    opened = opened_at(folder)
    learner = ShardedLearner(
        ranks, copy.deepcopy(opened.loaded.model), RATE, steps=9, shards=folder / "shards",
        whole=opened.loaded.model, copies=ranks.size,
    )  # fmt: skip
    return learner, opened


def follow_rollouts(ranks: Ranks, learner: ShardedLearner, following: FollowingRollouts) -> None:
    for order, told in ranks.orders():
        if order in (ROLL_OUT, HAND_IN):
            following.follow(order)
        else:
            learner.follow(order, told)


def rollouts(ranks: Ranks, folder: Path) -> dict[str, Any]:
    learner, opened = ranked(ranks, folder)
    reference = learner.reference()
    if ranks.rank:
        follow_rollouts(ranks, learner, Rounded(ranks, opened, CONFIG))
        return {}
    leading = LeadingRollouts(ranks, ranks.size).collect
    steps = [step_of(learner, reference, opened, folder / "ranks.db", leading) for _ in range(2)]
    ranks.order(LEAVE)
    alone = opened_at(folder)
    plain = Learner(alone.loaded.model, RATE, steps=9)
    first = plain.reference()
    expected = [step_of(plain, first, alone, folder / "alone.db", collect) for _ in range(2)]
    weights = zip(alone.loaded.model.parameters(), opened.loaded.model.parameters(), strict=True)
    return {
        "same": [one[key] == other[key] for one, other in zip(steps, expected, strict=True)
                 for key in ("keys", "tokens", "versions")],
        "logprobs": max(abs(a - b) for one, other in zip(steps, expected, strict=True)
                        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)),
        "scores": max((a - b).abs().max().item() for one, other in zip(steps, expected, strict=True)
                      for a, b in zip(one["scores"], other["scores"], strict=True)),
        "loss": [one["loss"] - other["loss"] for one, other in zip(steps, expected, strict=True)],
        "weights": max((one - other).abs().max().item() for one, other in weights),
        "grad_norm": min(one["grad_norm"] for one in expected), "runs": len(steps[0]["keys"]),
        "dealt": deal([3] * 5, ranks.size),
    }  # fmt: skip


class Failing(FollowingRollouts):
    """Its disk is full, it is killed, or it takes a minute."""

    how = ""

    def _roll_out(self, share: RolloutShare) -> list[Trajectory]:
        if self.how == "full":
            raise LogError("no space left")
        if self.how == "killed":
            os.kill(os.getppid(), signal.SIGTERM)  # as torchrun does to the others
            os._exit(1)
        time.sleep(60)
        return []


def failing(ranks: Ranks, folder: Path, how: str) -> dict[str, Any]:
    learner, opened = ranked(ranks, folder)
    if ranks.rank:
        Failing.how = how
        kind = Failing if ranks.rank == ranks.size - 1 else Rounded
        follow_rollouts(ranks, learner, kind(ranks, opened, CONFIG))
        return {}

    def on_run(run: Trajectory) -> None:
        if how == "slow":
            raise LogError("no space left here")

    signal.signal(signal.SIGTERM, lambda *_: None)
    told: dict[str, Any] = {}
    runtime, began = live(opened, folder / "failing.db", 0), time.monotonic()
    try:
        with runtime.store:
            LeadingRollouts(ranks, ranks.size).collect(TASKS, runtime, group_size=3, on_run=on_run)
    except NanoError as problem:
        told = {"said": str(problem), "code": problem.exit_code}
    ranks.order(LEAVE)
    codes = [os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in OTHERS]
    OTHERS.clear()
    print(json.dumps({**told, "others": codes, "seconds": time.monotonic() - began}), flush=True)
    os._exit(0)  # the process group cannot be closed without the one that ended


ON_FOLDER: dict[str, Any] = {"save": save, "load": load, "rollouts": rollouts, "failing": failing}


OTHERS: list[int] = []
"""process ids of the other ranks that this one has forked"""


def forked(ranks: int) -> None:
    """In place of torchrun: ranks in forks of this process, which has imported torch."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "RANK": "0"}
    for rank in range(1, ranks):
        if (other := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            main()
            sys.stdout.flush()
            os._exit(0)
        OTHERS.append(other)
    main()
    for other in OTHERS:
        assert os.waitpid(other, 0)[1] == 0


def main() -> None:
    ranks = Ranks.connect()
    ranks.join("cpu")
    what, *rest = sys.argv[1:]
    with ranks.beating():
        told = exact(ranks, *rest) if what == "exact" else ON_FOLDER[what](ranks, Path(rest[0]), *rest[1:])
    if ranks.rank == 0:
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        forked(int(sys.argv.pop(1)))
    else:
        main()
