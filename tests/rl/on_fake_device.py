"""Samples, scores and trains on a device that is not the CPU, and compares each number with the CPU's.

    python tests/rl/on_fake_device.py [FAMILY ...]

Prints a line for each part and family; a tensor made on the CPU by accident ends it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from architectures import build
from fake_device import install
from families import sample

from nano_coder.models.local import attention
from nano_coder.models.local.engine import Engine, kv_token_bytes
from nano_coder.models.local.policy import LocalPolicy, Lockstep
from nano_coder.models.local.sampler import GenerationRequest
from nano_preferences.config import DpoConfig
from nano_preferences.critic import Chain, Critic, CriticTerms, scalar_model
from nano_preferences.dpo import PairObjective, pair_batches, reference_scores
from nano_preferences.pairs import PairRows
from nano_preferences.reward_model import bradley_terry, pair_margins
from nano_rl.learn import prefix_tree
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.learner import Learner, Reference, prepare
from nano_rl.learn.logprob import can_share, token_logprobs
from nano_shared.types import Sampling

FAMILIES = ("llama", "qwen3", "gemma2", "gpt-oss", "mixtral", "lfm2", "gpt2")
FAST = OptimizerConfig(learning_rate=1e-2)


def samples() -> list[Any]:
    return [sample([3, *range(5, 25), n + 4, 7, 9, n], [0] * 21 + [1] * 4, n) for n in range(3)]


def sampler(model: Any) -> list[float]:
    """Log-probs of two turns of four rows, of two prompts, and of a teacher-forced row."""
    engine = Engine(model, eos_ids=frozenset(), context_limit=200)
    rows = [
        GenerationRequest(tuple(range(3 + n // 2, 24)), Sampling(max_tokens=4, temperature=n % 2), n, n)
        for n in range(4)
    ]
    first = engine.generate(rows)
    again = [
        GenerationRequest((*r.ids, *s.ids, 9, 8), Sampling(max_tokens=3), r.seed, r.owner)
        for r, s in zip(rows, first, strict=True)
    ]
    second = engine.generate(again)
    ids = [float(i) for s in (*first, *second) for i in s.ids]
    return [
        *ids,
        *(p for s in (*first, *second) for p in s.logprobs),
        *engine.score([tuple(range(3, 20))])[0],
    ]


def defaults(model: Any) -> None:
    """On a device the scheduler is free, rows are as many as memory holds, and agents twice as many."""
    engine = Engine(model, eos_ids=frozenset(), context_limit=200)
    template: Any = None
    policy = LocalPolicy(engine, template, id="tiny")
    assert (type(policy._scheduler) is Lockstep) == (engine.device.type == "cpu")
    on_cpu = engine.device.type == "cpu"
    rows = 64 if on_cpu else (4 << 30) // (1024 * kv_token_bytes(model))
    assert (engine.max_batch, policy.agents_together) == (rows, rows if on_cpu else 2 * rows)


def likelihood(model: Any, batch: Batch) -> Any:
    return -token_logprobs(model, batch).sum(), {"tokens": 1.0}


def trainer(model: Any) -> list[float]:
    """Losses and gradient norms of two steps, and the log-probs after them and of the reference."""
    reference = Reference(model)
    learner = Learner(model, FAST, steps=2)
    batches = make_batches(samples(), max_tokens=1000, trees=can_share(model))
    found = [learner.update(batches, likelihood, lambda metrics: None) for _ in range(2)]
    numbers = [values["grad_norm"] for values in found]
    for batch in reference.score([b.with_old(token_logprobs(model, b)) for b in batches]):
        assert batch.old_logprobs_BT is not None
        assert batch.reference_logprobs_BT is not None
        numbers += batch.old_logprobs_BT.flatten().tolist() + batch.reference_logprobs_BT.flatten().tolist()
    return numbers


def critic(model: Any) -> list[float]:
    """Values before and after an update of the critic."""
    terms = CriticTerms(learning_rate=FAST.learning_rate)
    judge = Critic(model, steps=2, lora_rank=0, max_tokens=1000, seed=0, terms=terms)
    chains = [Chain(rows=(one,), rewards=((0.0,) * (len(one.ids) - 1) + (1.0,),)) for one in samples()]
    rows = [row for of in judge.rows(chains) for row in of]
    values = judge.update(rows, ends_step=True)
    return [values["value_loss"], values["value_grad_norm"], *judge.values(samples())[0]]


def pairs() -> list[PairRows]:
    a, b, c = samples()
    return [
        PairRows(chosen=(a,), rejected=(b,), prompt_key="0", encoded=False),
        PairRows(chosen=(b,), rejected=(c,), prompt_key="1", encoded=False),
    ]


def dpo(model: Any) -> list[float]:
    config = DpoConfig(lambda_sft=0.5, length_normalised=True)
    reference = reference_scores(model, pairs(), config)
    objective = PairObjective(pairs(), [0, 1], reference, config)
    learner = Learner(model, FAST, steps=1)
    learner.update(pair_batches(pairs(), [0, 1], 1000), objective, lambda metrics: None)
    return [*reference.values(), *objective.metrics().values()]


def reward_model(model: Any) -> list[float]:
    scalar = scalar_model(model, lora_rank=0, seed=0, bias=False)
    learner = Learner(scalar, FAST, steps=1)

    def objective(module: Any, part: Any) -> Any:
        loss = bradley_terry(pair_margins(module, part)).sum()
        return loss, {"loss": loss.item()}

    learner.update([pairs()], objective, lambda metrics: None)  # type: ignore[list-item, arg-type]
    return pair_margins(scalar, pairs()).tolist()  # type: ignore[no-any-return]


PARTS = (sampler, trainer, critic, dpo, reward_model)


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    device = install()
    # as small as to make long rows of these short ones
    attention._BLOCK_SCORES = prefix_tree._BLOCK_SCORES = 64
    for name in names or FAMILIES:
        for place in ("cpu", device):
            defaults(prepared(name, 0, place))
        for lora in (0, 2):
            for part in PARTS:
                if lora and part in (critic, reward_model):
                    continue
                here, there = (prepared(name, lora, place) for place in ("cpu", device))
                expected, found = part(here), part(there)
                worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
                print(
                    f"{name} rank {lora} {part.__name__}: {len(found)} numbers, {worst:.1e} apart", flush=True
                )
                assert worst < 1e-3, (expected, found)


def prepared(name: str, lora: int, place: Any) -> Any:
    base = build(name).to(place)
    base.config._experts_implementation = "eager"  # the other counts tokens as CUDA alone does
    base.tie_weights()  # a move to this device makes new parameters
    model = prepare(base, lora_rank=lora, seed=0)
    torch.manual_seed(1)
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
