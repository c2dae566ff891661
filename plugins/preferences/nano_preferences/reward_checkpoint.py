"""Reward model checkpoints: a one-label sequence classifier for transformers, with nano's manifest."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from nano_coder.agent.profiles import find_profile
from nano_coder.models.opening import OpenedWeights, bound_template
from nano_coder.models.weights import end_of_turn, place, quiet_transformers
from nano_preferences.critic import ScalarModel, by_budget
from nano_preferences.reward_model import RewardModelReport, row_scores
from nano_rl.checkpoints.checkpoint import sign_checkpoint
from nano_rl.imitation import RunEncoder
from nano_shared.checkpoint import (
    Listed,
    Manifest,
    TrainedOn,
    atomic_checkpoint,
    read_checkpoint,
    resolve_checkpoint,
)
from nano_shared.errors import UsageError
from nano_shared.lora import merge_adapter
from nano_shared.settings import Config
from nano_shared.snapshot import BlobStore
from nano_shared.types import Trajectory

CALIBRATION = "calibration.html"
"""file name of the calibration page in the checkpoint"""
KIND = "reward_model"
MAX_TOKENS = 8192
"""positions of one micro-batch for scoring runs"""


def save_reward_model(
    target: Path, model: ScalarModel, opened: OpenedWeights, *, parent: str, config: Config, steps: int,
    run_ids: Iterable[str], tasks: Iterable[Listed] = (), report: RewardModelReport, page: str | None = None,
) -> Manifest:  # fmt: skip
    """Write a reward model atomically, with its adapter merged; `page` is its calibration page (HTML). Raises
    CheckpointError where the target exists or the disk is full, UsageError for an architecture that
    transformers has no classifier for."""
    classifier = _classifier(model, opened)
    with atomic_checkpoint(target) as folder, quiet_transformers():
        classifier.save_pretrained(folder)
        opened.loaded.tokenizer.save_pretrained(folder)
        if page is not None:
            (folder / CALIBRATION).write_text(page, encoding="utf-8", newline="\n")
        sign_checkpoint(
            folder, opened, name=target.name, kind=KIND, base_model=opened.loaded.id, parent=parent,
            policy_version=steps, trained_on=TrainedOn.of(run_ids, tasks), config=config,
            metrics=report.metrics(),
        )  # fmt: skip
    return read_checkpoint(target)


class SavedRewardModel:
    """An opened reward model, which scores runs of policies with the same vocabulary and template."""

    def __init__(self, name: str, model: ScalarModel, reader: RunEncoder, *, context_limit: int) -> None:
        self.name = name
        self.model = model
        self._reader = reader
        self._context_limit = context_limit

    @torch.no_grad()
    def __call__(self, runs: Sequence[Trajectory], blobs: BlobStore | None = None) -> list[float]:
        """[G] the score of each run: log-odds up to a constant; -inf for a run without turns. Of runs longer
        than the context only the last tokens are read. `blobs` are the log's, which know the directories that
        text-only runs began in (`run_messages`). Raises UsageError for a run of another template or
        vocabulary, LogError if a directory is missing."""
        scores = [-float("inf")] * len(runs)
        written = [i for i, run in enumerate(runs) if run.turns]
        rows = [self._row(runs[i], blobs)[-self._context_limit :] for i in written]
        for part in by_budget([len(row) for row in rows], MAX_TOKENS):
            found = row_scores(self.model, [rows[p] for p in part]).tolist()
            for index, score in zip(part, found, strict=True):
                scores[written[index]] = score
        return scores

    def _row(self, run: Trajectory, blobs: BlobStore | None) -> tuple[int, ...]:
        if run.has_tokens and not self._reader.reads(run):
            raise UsageError(
                f"run {run.id} holds tokens of another template or vocabulary than reward model {self.name}"
                " reads; train one on this policy's backbone: nano-rl reward-model --model POLICY"
            )
        return self._reader.last_row(run, blobs)


def open_reward_model(name: str) -> SavedRewardModel | None:
    """The reward model of a checkpoint; None for a policy. Raises CheckpointError."""
    folder = resolve_checkpoint(name)
    manifest = read_checkpoint(folder)
    if manifest.kind != KIND:
        return None
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with quiet_transformers():
        classifier: Any = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = ScalarModel(classifier.to(place("auto")), bias=False)
    with torch.no_grad():
        model.head.weight.copy_(classifier.score.weight)
    profile = find_profile(manifest.profile)
    own = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    end = end_of_turn(tokenizer, profile.chat_template or own)
    reader = RunEncoder(
        profile=profile, template=bound_template(profile, tokenizer, own),
        eos_id=end if end is not None else tokenizer.eos_token_id,
    )  # fmt: skip
    limit = int(classifier.config.max_position_embeddings)
    return SavedRewardModel(manifest.name, model.requires_grad_(False), reader, context_limit=limit)


def _classifier(model: ScalarModel, opened: OpenedWeights) -> Any:
    from transformers import AutoModelForSequenceClassification

    lm: Any = copy.deepcopy(model.lm)
    if hasattr(lm, "peft_config"):
        lm, _ = merge_adapter(lm)
    config = copy.deepcopy(lm.config)
    config.num_labels = 1
    config.pad_token_id = opened.loaded.pad_id
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        try:
            classifier: Any = AutoModelForSequenceClassification.from_config(config)
        except ValueError:
            raise UsageError(
                f"{type(lm).__name__} has no classifier in transformers to save a reward model as;"
                " use a Llama, Qwen or other common backbone"
            ) from None
    classifier = classifier.to(next(lm.parameters()).dtype)
    classifier.model.load_state_dict(lm.model.state_dict())
    with torch.no_grad():
        classifier.score.weight.copy_(model.head.weight)
    return classifier
