"""Where a checkpoint comes from: its parents, one after the other, up to the base, which is no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nano_coder.runtime import BASE
from nano_rl.checkpoints.evaluations import checkpoint_folder
from nano_shared.checkpoint import Manifest, read_checkpoint
from nano_shared.errors import CheckpointError


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
