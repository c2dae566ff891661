"""`nano-rl checkpoints export`: a checkpoint for programs without nano."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from nano_coder.models.opening import OpenedWeights, open_weights, stored_dtype
from nano_coder.models.weights import Dtype, quiet_transformers
from nano_shared.checkpoint import write_manifest
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import durable_folder
from nano_shared.printable import printable

BASE_FOLDER = "base"
ADAPTER_FOLDER = "adapter"
_WHOLE = 0.99
"""share of an adapter's change beyond which rounding has lost nothing that matters"""


def command(
    name: Annotated[str, Argument(metavar="NAME", help="Of a checkpoint.")],
    target: Annotated[Path, Option("--to", help="New folder to write, with its parents.")],
    adapter: Annotated[
        bool, Option("--adapter", help="Adapter and base apart, in TO/adapter and TO/base.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Option(help="Of the written weights.", show_default="as they are stored"),
    ] = None,
) -> int:
    """Write NAME for programs without nano: a model that transformers and vLLM load, or with --adapter a PEFT
    adapter beside its base."""
    said = export_checkpoint(name, target, adapter=adapter, dtype=dtype)
    if said:
        print(said, file=sys.stderr)
    print(printable(str(target / ADAPTER_FOLDER if adapter else target)))
    if adapter:
        print(printable(f"its base: {target / BASE_FOLDER}"), file=sys.stderr)
    return 0


def export_checkpoint(name: str, target: Path, *, adapter: bool, dtype: Dtype | None = None) -> str:
    """Write weights, tokenizer and chat template of a model to the new folder `target`: one merged model, or
    with `adapter` the folders `base/` and `adapter/`. `dtype` None is that of the stored weights. Returns a
    sentence that says what rounding has left of a merged adapter, else nothing. Raises UsageError for an
    unknown model, for `adapter` with a model that has none, and if `target` exists; CheckpointError for a
    damaged model or a full disk."""
    if target.exists():
        raise UsageError(f"{target} exists; name a new folder with --to")
    stored = dtype or stored_dtype(name)
    opened = open_weights(name, dtype=stored)
    model: Any = opened.loaded.model
    if adapter and not hasattr(model, "peft_config"):
        raise UsageError(f"{name} is a full model, not an adapter; export it without --adapter")
    said = ""
    with durable_folder(target, CheckpointError) as folder, quiet_transformers():
        if adapter:
            _copy_adapter(opened, folder / ADAPTER_FOLDER, base=target.absolute() / BASE_FOLDER)
            model = model.unload()
        elif hasattr(model, "peft_config"):
            model, said = _merged(model, stored)
        whole = folder / BASE_FOLDER if adapter else folder
        model.save_pretrained(whole)
        _save_text_side(opened, whole)
        if opened.manifest:
            kind: Literal["adapter", "full"] = "adapter" if adapter else "full"
            manifest = opened.manifest.model_copy(update={"kind": kind})
            write_manifest(folder / ADAPTER_FOLDER if adapter else folder, manifest)
    return said


def _merged(model: Any, dtype: str) -> tuple[Any, str]:
    from nano_shared.lora import merge_adapter

    merged, share = merge_adapter(model)
    said = f"{share:.1%} of the adapter's change of the weights is in the merged {dtype} ones"
    if share < _WHOLE:
        said += "; --dtype float32 or --adapter keeps all of it"
    return merged, said


def _copy_adapter(opened: OpenedWeights, folder: Path, base: Path) -> None:
    """Copy the adapter's files and set the path of its base: PEFT resolves no relative path."""
    source = opened.loaded.path
    assert source is not None  # an adapter is always read from a folder
    folder.mkdir()
    shutil.copy(source / "adapter_model.safetensors", folder)
    settings = json.loads((source / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    _save_text_side(opened, folder)


def _save_text_side(opened: OpenedWeights, folder: Path) -> None:
    tokenizer = opened.loaded.tokenizer
    tokenizer.save_pretrained(folder)
    template = opened.profile.chat_template or opened.loaded.chat_template
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
