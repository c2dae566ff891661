"""The peer's side of `trl_losses.py`, run by TRL's own Python: JSON requests on stdin, answers on stdout.

TRL's `GRPOTrainer._compute_loss` is called as it is, on a trainer that is given its log-probs. Its importance
weights and its advantages are statements inside a longer method: those statements are taken out of the
installed source and executed, so that nothing of TRL is written anew here.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import sys
import textwrap
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer


def statement(test: str, name: str) -> Any:
    """The `if` of `_generate_and_score_completions` with that condition that sets `name`, compiled."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    # the condition may come again where its result is logged
    found = [
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.If) and ast.unparse(n.test) == test and f"{name} = " in ast.unparse(n)
    ]
    return compile(ast.Module(body=[found[0]], type_ignores=[]), "trl", "exec")


WEIGHTS = statement(
    "self.use_vllm and self.vllm_importance_sampling_correction", "vllm_importance_sampling_ratio"
)
ADVANTAGES = statement("self.multi_objective_aggregation == 'sum_then_normalize'", "advantages")


def tensor(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def weights(request: dict[str, Any], old: torch.Tensor, behaviour: torch.Tensor, mask: torch.Tensor) -> Any:
    names = {
        **vars(grpo_trainer),
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=request["is_mode"],
            vllm_importance_sampling_clip_min=request["is_min"],
            vllm_importance_sampling_clip_max=request["is_max"],
        ),
        "completion_mask": mask,
        "tool_mask": None,
        "old_per_token_logps": old,
        "sampling_per_token_logps": behaviour,
    }
    exec(WEIGHTS, names)
    return names["vllm_importance_sampling_ratio"]


def loss(request: dict[str, Any]) -> dict[str, Any]:
    tensors = {n: tensor(request[n]) for n in ("logprobs", "old", "behaviour", "reference", "advantages")}
    mask = tensor(request["mask"])
    logprobs = tensors["logprobs"].requires_grad_()
    zeros = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": zeros[:, :1], "prompt_mask": zeros[:, :1], "completion_ids": zeros,
        "completion_mask": mask, "advantages": tensors["advantages"], "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"], "num_items_in_batch": tensor(request["num_tokens"]),
        "sampling_per_token_logps": tensors["behaviour"],
    }  # fmt: skip
    if request["is_mode"]:
        inputs["importance_sampling_ratio"] = weights(request, tensors["old"], tensors["behaviour"], mask)
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, zeros, None),
        model=SimpleNamespace(training=True), aux_loss_enabled=False,
        top_entropy_quantile=1.0, _entropy_bonus_enabled=False,
        off_policy_mask_threshold=request["off_policy"],
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        importance_sampling_level=request["level"], beta=request["beta"], loss_type=request["loss_type"],
        epsilon_low=request["epsilon_low"], epsilon_high=request["epsilon_high"],
        use_vllm=bool(request["is_mode"]), vllm_importance_sampling_correction=True,
        max_completion_length=request["length"],
        current_gradient_accumulation_steps=request["micro_batches"],
        args=SimpleNamespace(
            delta=request["delta"], use_bias_correction_kl=False,
            steps_per_generation=request["micro_batches"],
        ),
        accelerator=accelerator, _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    value = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"loss": value.item(), "gradient": gradient.tolist()}


def advantages(request: dict[str, Any]) -> dict[str, Any]:
    rewards = tensor([[math.nan if r is None else r] for r in request["rewards"]])
    names = {
        **vars(grpo_trainer),
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards=request["scale"],
            reward_weights=torch.ones(1, dtype=torch.float64),
        ),
        "rewards_per_func": rewards,
        "unscorable_mask": torch.isnan(rewards).all(dim=1),
        "num_generations": request["group"],
        "device": "cpu",
    }
    exec(ADVANTAGES, names)
    # what the method does next: an unscorable row has no advantage
    return {"advantages": names["advantages"].masked_fill(names["unscorable_mask"], 0.0).tolist()}


for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps(loss(asked) if "logprobs" in asked else advantages(asked)), flush=True)
