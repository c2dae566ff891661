"""A checkpoint as a folder that transformers, PEFT and vLLM load without nano, merged or beside its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from nano_coder.models.opening import OpenedWeights, open_weights
from nano_coder.models.weights import quiet_transformers
from nano_shared.durable import durable_folder
from nano_shared.errors import CheckpointError, UsageError

BASE_FOLDER = "base"
ADAPTER_FOLDER = "adapter"


def export_checkpoint(name: str, target: Path, *, adapter: bool, dtype: str) -> None:
    """Write the weights of a local model, its tokenizer and its chat template to the new folder `target`.

    Merged, `target` is one model in Hugging Face format. With `adapter` it holds `base/`, the model that was
    adapted, and `adapter/`, whose `base_model_name_or_path` is the absolute path of `base/`. `dtype` is
    float32, bfloat16 or auto. Raises UsageError for an unknown model, for one without an adapter where
    `adapter` asks for it, and where `target` exists; CheckpointError for a damaged one or a full disk.
    """
    if target.exists():
        raise UsageError(f"{target} exists; name a new folder with --to")
    opened = open_weights(name, dtype=dtype, merge=not adapter)  # type: ignore[arg-type]
    model: Any = opened.loaded.model
    if adapter and not hasattr(model, "peft_config"):
        raise UsageError(f"{name} is a full model, not an adapter; export it without --adapter")
    with durable_folder(target, CheckpointError) as folder, quiet_transformers():
        if adapter:
            _copy_adapter(opened, folder / ADAPTER_FOLDER, base=target.absolute() / BASE_FOLDER)
            model = model.unload()
        whole = folder / BASE_FOLDER if adapter else folder
        model.save_pretrained(whole)
        _save_text_side(opened, whole)


def _copy_adapter(opened: OpenedWeights, folder: Path, base: Path) -> None:
    """The adapter's own files, but for the name of its base: PEFT resolves no relative path."""
    source = opened.loaded.path
    assert source is not None  # an adapter is always read from a folder
    folder.mkdir()
    shutil.copy(source / "adapter_model.safetensors", folder)
    settings = json.loads((source / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    _save_text_side(opened, folder)


def _save_text_side(opened: OpenedWeights, folder: Path) -> None:
    """Tokenizer and chat template, the one that the policy was trained with."""
    tokenizer = opened.loaded.tokenizer
    tokenizer.save_pretrained(folder)
    template = opened.profile.chat_template or opened.loaded.chat_template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
