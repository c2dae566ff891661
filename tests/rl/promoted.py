"""What tests of promotion need: checkpoints without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nano_shared.checkpoint import Manifest, atomic_checkpoint, write_manifest
from nano_shared.files import checkpoints_dir

NANO = Callable[..., tuple[int, str, str]]


def checkpoint(name: str, **changes: object) -> Path:
    """A checkpoint without weights: promotion looks at manifests alone."""
    target = checkpoints_dir() / name
    with atomic_checkpoint(target) as folder:
        (folder / "weights").write_text(name)
        fields = {
            "name": name, "kind": "adapter", "base_model": "base", "parent": "base", "profile": "compact-1",
            "profile_hash": "p", "template_hash": "t", "tools_hash": "u", "code_version": "1", "created": 1.0,
        }  # fmt: skip
        write_manifest(folder, Manifest.model_validate(fields | changes))
    return target
