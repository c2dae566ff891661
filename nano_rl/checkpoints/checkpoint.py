"""Checkpoints: writing them in Hugging Face or PEFT format with a manifest, and their ancestry."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_coder import __version__ as runtime_version
from nano_coder.models.catalogue import name_of
from nano_coder.models.opening import OpenedWeights
from nano_coder.models.weights import BASE, quiet_transformers
from nano_rl.checkpoints.evaluate import checkpoint_folder
from nano_shared.checkpoint import (
    Listed,
    Manifest,
    TrainedOn,
    atomic_checkpoint,
    read_checkpoint,
    write_manifest,
)
from nano_shared.errors import CheckpointError
from nano_shared.files import content_hash
from nano_shared.settings import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """One entry of an ancestry. `manifest` is None at its end; `remark` then says why, if it is broken."""

    name: str
    manifest: Manifest | None
    remark: str | None = None


def ancestry(folder: Path) -> list[Ancestor]:
    """The checkpoint, its parents, and the base model last; if a parent is missing, the last entry says so.
    Only the files of the checkpoint itself are verified. Raises CheckpointError if it is damaged."""
    manifest = read_checkpoint(folder)
    chain = [Ancestor(name=manifest.name, manifest=manifest)]
    seen = {folder.resolve()}
    while (parent := manifest.parent) is not None:
        above = checkpoint_folder(parent)
        remark: str | None = None
        if above is None:
            is_base = parent in (BASE, manifest.base_model)
            if not (is_base or (Path(parent) / "config.json").is_file()):
                remark = f"is not at hand: it was deleted, or {manifest.name} was trained elsewhere"
        elif above.resolve() in seen:
            remark = "is named as its own ancestor"
        else:
            seen.add(above.resolve())
            try:
                manifest = read_checkpoint(above, verify=False)
                chain.append(Ancestor(name=manifest.name, manifest=manifest))
                continue
            except CheckpointError as problem:
                remark = str(problem)
        return [*chain, Ancestor(name=parent, manifest=None, remark=remark)]
    return [*chain, Ancestor(name=manifest.base_model, manifest=None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a training has learned from, and how it ended."""

    steps: int
    run_ids: Iterable[str] = ()
    tasks: Iterable[Listed] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def save_checkpoint(
    target: Path, model: Any, opened: OpenedWeights, *, parent: str, config: Config, learned: Learned
) -> Manifest:
    """Write a checkpoint that transformers and PEFT load without nano, atomically; `parent` is what it was
    trained from. Raises CheckpointError if the target exists or the disk is full."""
    adapter = hasattr(model, "peft_config")
    with atomic_checkpoint(target) as folder, quiet_transformers():
        if adapter:
            save_adapter(model, folder, opened)
        else:
            model.save_pretrained(folder)
            opened.loaded.tokenizer.save_pretrained(folder)
        sign_checkpoint(
            folder, opened, name=target.name, kind="adapter" if adapter else "full",
            base_model=_base(model, opened) if adapter else opened.loaded.id, parent=parent,
            policy_version=opened.version + learned.steps, config=config,
            trained_on=TrainedOn.of(learned.run_ids, learned.tasks), metrics=dict(learned.metrics),
        )  # fmt: skip
    return read_checkpoint(target)


def sign_checkpoint(
    folder: Path, opened: OpenedWeights, *, config: Config, metrics: dict[str, float], **fields: Any
) -> None:
    """Write the chat template, and last the manifest: `fields`, and what the opened weights say."""
    profile = opened.profile
    template = profile.chat_template or opened.loaded.chat_template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    manifest = Manifest(
        profile=profile.name, profile_hash=profile.hash, template_hash=content_hash(template),
        tools_hash=profile.tools_hash, config=config.model_dump(mode="json"), metrics=metrics,
        code_version=runtime_version, created=time.time(), **fields,
    )  # fmt: skip
    write_manifest(folder, manifest)


def save_adapter(model: Any, folder: Path, opened: OpenedWeights) -> None:
    """Write the LoRA adapter of a model in PEFT's format; that of a bfloat16 base in bfloat16."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    dtype = next(p.dtype for n, p in model.named_parameters() if "lora_" not in n)
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    # without this PEFT looks up the base on the hub to compare its vocabulary
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {name: value.detach().to(kept).contiguous() for name, value in state.items()},
        str(folder / "adapter_model.safetensors"),
        metadata={"format": "pt"},
    )
    config = model.peft_config["default"]
    config.base_model_name_or_path = _base(model, opened)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def _base(model: Any, opened: OpenedWeights) -> str:
    """The base of the adapter, as a name that resolves on other machines if there is one."""
    if opened.loaded.kind == "base":
        return BASE
    if opened.loaded.kind == "adapter":
        return str(model.peft_config["default"].base_model_name_or_path)
    path = opened.loaded.path
    return (name_of(path) or str(path.resolve())) if path else opened.loaded.id
