"""Writing checkpoints: weights or adapter in the ecosystem's own format, and the manifest last."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nano_coder import __version__ as runtime_version
from nano_coder.models.opening import OpenedWeights
from nano_coder.models.weights import BASE, quiet_transformers
from nano_rl.checkpoints.evaluations import checkpoint_folder
from nano_rl.learn.config.objective import Config
from nano_shared.checkpoint import (
    Listed,
    Manifest,
    TrainedOn,
    atomic_checkpoint,
    read_checkpoint,
    write_manifest,
)
from nano_shared.errors import CheckpointError
from nano_shared.hashing import content_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """One step up. `manifest` is None where the lineage ends, and `remark` says what stands there."""

    name: str
    manifest: Manifest | None
    remark: str | None = None

    @property
    def broken(self) -> bool:
        """Whether something is missing here that should be at hand."""
        return self.manifest is None and self.remark is not None


def ancestry(folder: Path) -> list[Ancestor]:
    """The checkpoint itself, its parents, and last the base; where the chain breaks, the last says how.

    Only the checkpoint itself has its files verified. Raises CheckpointError where it is damaged itself.
    """
    manifest = read_checkpoint(folder)
    chain = [Ancestor(name=manifest.name, manifest=manifest)]
    seen = {folder.resolve()}
    while manifest.parent is not None:
        above = checkpoint_folder(manifest.parent)
        if above is None:
            chain.append(_not_a_checkpoint(manifest))
            return chain
        if above.resolve() in seen:
            chain.append(Ancestor(name=manifest.parent, manifest=None, remark="is named as its own ancestor"))
            return chain
        seen.add(above.resolve())
        try:
            manifest = read_checkpoint(above, verify=False)
        except CheckpointError as problem:
            chain.append(Ancestor(name=manifest.parent, manifest=None, remark=str(problem)))
            return chain
        chain.append(Ancestor(name=manifest.name, manifest=manifest))
    chain.append(Ancestor(name=manifest.base_model, manifest=None))
    return chain


def _not_a_checkpoint(child: Manifest) -> Ancestor:
    """The base that training began from, or a checkpoint that is gone."""
    parent = str(child.parent)
    if parent in (BASE, child.base_model) or (Path(parent) / "config.json").is_file():
        return Ancestor(name=parent, manifest=None)
    return Ancestor(
        name=parent,
        manifest=None,
        remark=f"is not at hand: it was deleted, or {child.name} was trained elsewhere",
    )


def save_checkpoint(
    target: Path,
    model: Any,
    opened: OpenedWeights,
    *,
    parent: str,
    config: Config,
    steps: int,
    run_ids: Iterable[str],
    tasks: Iterable[Listed],
    metrics: dict[str, float],
) -> Manifest:
    """Write a checkpoint that plain transformers and PEFT load, whole or not at all.

    `parent` is the model's name as training was given it. An adapter trained on a bfloat16 base is stored
    in bfloat16. Raises CheckpointError where the target exists or the disk is full.
    """
    adapter = hasattr(model, "peft_config")
    profile = opened.profile
    template = profile.chat_template or opened.loaded.chat_template
    with atomic_checkpoint(target) as folder, quiet_transformers():
        if adapter:
            _save_adapter(model, folder, opened)
        else:
            model.save_pretrained(folder)
            opened.loaded.tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        write_manifest(
            folder,
            Manifest(
                name=target.name,
                kind="adapter" if adapter else "full",
                base_model=_base(model, opened) if adapter else opened.loaded.id,
                parent=parent,
                profile=profile.name,
                profile_hash=profile.hash,
                template_hash=content_hash(template),
                tools_hash=profile.tools_hash,
                policy_version=opened.version + steps,
                trained_on=TrainedOn.of(run_ids, tasks),
                config=config.model_dump(mode="json"),
                metrics=metrics,
                code_version=runtime_version,
                created=time.time(),
            ),
        )
    return read_checkpoint(target)


def _save_adapter(model: Any, folder: Path, opened: OpenedWeights) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    dtype = next(p.dtype for n, p in model.named_parameters() if "lora_" not in n)
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    # the vocabulary is the base's: without this PEFT looks for the base on the hub, to compare
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
    """What the adapter sits on, as a name that the next user's machine resolves too where there is one."""
    from nano_coder.models.weights import BASE

    if opened.loaded.kind == "base":
        return BASE
    if opened.loaded.kind == "adapter":
        return str(model.peft_config["default"].base_model_name_or_path)
    return str(opened.loaded.path.resolve() if opened.loaded.path else opened.loaded.id)
