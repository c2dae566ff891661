"""Saved shards: trained weights and moments of the optimizer by torch's distributed checkpoints.

Each rank writes what it holds; any number of ranks reads them back, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from nano_cluster.ranks import Ranks
from nano_rl.resume import MANIFEST, STATES
from nano_shared.errors import CheckpointError
from nano_shared.files import file_hash, full_disk_explained, sync

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_shards(
    folder: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> dict[str, Any]:
    """Write `folder`, atomically; all ranks call it. Returns on rank 0 `counts`, the updates that each weight
    had, and `files`, the hash of each file. Folders that no saved state needs are removed."""
    counts = {name: float(optimizer.state[p]["step"]) for name, p in trained.items() if p in optimizer.state}
    tree = {name: p.detach() for name, p in trained.items()} | {
        f"{moment}/{name}": optimizer.state[trained[name]][moment] for name in counts for moment in MOMENTS
    }
    partial = folder.with_name(f".{folder.name}.tmp-shards")
    with full_disk_explained(folder, CheckpointError):
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        ranks.agree()
        dcp.save(tree, checkpoint_id=str(partial))
        files = {}
        if ranks.rank == 0:
            files = {path.name: file_hash(path) for path in sorted(partial.iterdir())}
            shutil.rmtree(folder, ignore_errors=True)  # its state was never written, or is about to be again
            sync(partial)
            partial.rename(folder)
            sync(folder.parent)
            for old in _unneeded(folder):
                shutil.rmtree(old)
    return {"counts": counts, "files": files}


def _unneeded(newest: Path) -> Iterator[Path]:
    """The folders beside `newest` of states that are gone: a state is written after its shards."""
    needed = {path.parent.name for path in (newest.parent.parent / STATES).glob(f"*/{MANIFEST}")}
    for path in newest.parent.iterdir():
        if path.name not in needed and path.name < min(needed, default="") and not path.name.startswith("."):
            yield path


def check_shards(folder: Path, files: Mapping[str, str]) -> None:
    """Raises CheckpointError if a file is missing or changed."""
    for name, expected in files.items():
        if not (folder / name).is_file() or file_hash(folder / name) != expected:
            raise CheckpointError(
                f"{folder}: {name} is missing or corrupt; put it back (all machines need the same folder), or"
                f" delete the state {folder.name} beside it to go on from the one before"
            )


@torch.no_grad()
def load_shards(
    folder: Path, trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer,
    counts: Mapping[str, float],
) -> None:  # fmt: skip
    """Set weights and optimizer to what `save_shards` wrote; all ranks call it."""
    moments: dict[str, dict[str, Tensor]] = {
        name: {moment: torch.zeros_like(trained[name]) for moment in MOMENTS} for name in counts
    }
    tree = {name: p.detach() for name, p in trained.items()} | {
        f"{moment}/{name}": tensor for name, of in moments.items() for moment, tensor in of.items()
    }
    dcp.load(tree, checkpoint_id=str(folder))
    optimizer.state.clear()
    for name, count in counts.items():
        weight = trained[name]
        step = torch.tensor(count, dtype=torch.float32, device=weight.device)
        optimizer.state[weight] = {"step": step, **moments[name]}
