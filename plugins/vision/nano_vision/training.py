"""Rows with images, and a policy gradient on them: an adapter on a vision-language model's language part.

The loss is `policy_loss` of the trainer; log-probs come from transformers' own forward pass over each row
with its pixels. The vision tower and what joins it to the language model stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.verify.trainable import RefusalCode, blocking
from nano_rl.learn.advantages import group_samples
from nano_rl.learn.batch import make_batches
from nano_rl.learn.groups import TrainSample, form_groups, is_dead
from nano_rl.learn.learner import clip_gradients
from nano_rl.learn.loss import mean_metrics, policy_loss, token_weights
from nano_rl.learn.objectives import Objective
from nano_shared.errors import UsageError
from nano_shared.run_facts import facts_of
from nano_shared.types import ImageRef, Trajectory
from nano_vision.model import Pixels, VisionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionRow:
    sample: TrainSample
    pixels: Pixels


def refusal_of(run: Trajectory, policy_id: str) -> str | None:
    """Why a run may not train these weights; None if it may. That it shows images is no reason here."""
    for code in blocking(facts_of(run)):
        if code is not RefusalCode.IMAGES:
            return str(code)
    if any(turn.completion.policy_id != policy_id for turn in run.turns):
        return "sampled by other weights"
    if any(turn.messages or turn.delegated_by is not None for turn in run.turns):
        return "its history was rewritten, or a sub-agent took part"
    return None


def row_images(run: Trajectory) -> list[tuple[ImageRef, ...]]:
    """The images of each token row, in the order of the rows."""
    shown, rows = list(run.task.images), dict[int, tuple[ImageRef, ...]]()
    for turn in run.turns:
        assert turn.completion.tokens is not None  # `refusal_of` was asked
        rows[turn.completion.tokens.row] = tuple(shown)
        shown += [image for seen in turn.observations for image in seen.images]
    return list(rows.values())


def vision_rows(
    runs: Iterable[Trajectory], loaded: VisionModel, get_blob: Callable[[str], bytes]
) -> list[list[VisionRow]]:
    """The rows of each group whose rewards differ, with mean-centred advantages."""
    groups = []
    for group in form_groups(runs):
        if len(group.trajectories) < 2 or is_dead(group.rewards_G):
            continue
        images = {run.id: iter(row_images(run)) for run in group.trajectories}
        rows = []
        for sample in group_samples(group):
            pixels = loaded.look(next(images[sample.run_id]), get_blob)
            rows.append(VisionRow(sample=sample, pixels=pixels))
        groups.append(rows)
    return groups


def add_adapter(model: Any, *, rank: int, seed: int) -> Any:
    """The model with a LoRA adapter of PEFT on every linear layer of its language part; of one that has an
    adapter, with that made trainable. Raises UsageError for a model that names no language part."""
    if hasattr(model, "peft_config"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return model
    from peft import LoraConfig, get_peft_model

    language = model.get_decoder()
    prefix = next((name for name, part in model.named_modules() if part is language), "")
    if not prefix:
        raise UsageError(f"{type(model).__name__} names no language part for an adapter")
    targets = [f"{prefix}.{name}" for name, part in language.named_modules() if type(part) is nn.Linear]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets)
        return get_peft_model(model, config)


def row_logprobs(loaded: VisionModel, row: VisionRow) -> Tensor:
    """[1, L] log-prob of each token of a row at its temperature, nats; 0 for the first."""
    given = loaded.arguments(row.sample.ids, row.pixels)
    logits_tV = loaded.model(**given, use_cache=False).logits[0, :-1].float() / row.sample.temperature
    picked_t1 = logits_tV.log_softmax(dim=-1).gather(1, given["input_ids"][0, 1:, None])
    return torch.cat([picked_t1.new_zeros(1), picked_t1[:, 0]])[None]


def add_gradients(loaded: VisionModel, rows: Sequence[VisionRow], objective: Objective) -> dict[str, float]:
    """Add the gradient of the policy loss over the rows of a step, row by row; returns the step's metrics."""
    weights = token_weights([row.sample for row in rows], objective.aggregation)
    metrics = []
    for row, weight in zip(rows, weights, strict=True):
        (batch,) = make_batches([row.sample], max_tokens=len(row.sample.ids), weights=[weight], trees=False)
        loss, found = policy_loss(row_logprobs(loaded, row), batch.to(loaded.device), objective)
        loss.backward()  # type: ignore[no-untyped-call]
        metrics.append(found)
    return mean_metrics(metrics)


def train_adapter(
    loaded: VisionModel, groups: Sequence[Sequence[VisionRow]], objective: Objective, *, learning_rate: float,
    on_step: Callable[[dict[str, float]], None],
) -> None:  # fmt: skip
    """One update for each group, in order, of the adapter in `loaded.model` (`add_adapter`). Raises
    UsageError for a first update on log-probs that are not those of these weights."""
    trained = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for number, rows in enumerate(groups):
        metrics = add_gradients(loaded, rows, objective)
        if number == 0 and metrics["mismatch"] > _MOST_DRIFT:
            drift = f"{metrics['mismatch']:.3g} nats"
            raise UsageError(f"the logged log-probs are {drift} from these weights': another model's")
        metrics["gradient"] = clip_gradients(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step(metrics)


_MOST_DRIFT = 0.1
"""nats, mean over the sampled tokens of the first update"""
