"""The lineage of a policy, and from it the policy version that sampled a logged run: how stale the run is.

A turn names the weights that its process started from (`policy_id`) and the number of updates that made the
sampling weights (`policy_version`). Checkpoints name their parents, which gives the ancestors of a policy:

    base, version 0  ->  first checkpoint, version 40  ->  the policy, version 100

A run of the base at version 25 is 75 updates old if it was sampled in the training of the first checkpoint.
If it is from another training of the base, it is 25 updates away from the base, which is 100 updates away
from the policy: version -25. Runs of weights that are no ancestors have no known age.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nano_coder.models.opening import OpenedWeights, weights_id
from nano_rl.logs.used_runs import USED, read_used
from nano_shared.checkpoint import MANIFEST, Manifest, checkpoints_dir, read_checkpoint, resolve_checkpoint
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.run_facts import RunFacts
from nano_shared.types import Trajectory

_GENERATIONS = 1000
"""bound on the number of ancestors, against circular parent names"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AncestorWeights:
    """The weights of a policy or of one of its ancestors."""

    id: str
    version: int
    """number of updates that made these weights"""
    until: int
    """version of its child in the lineage; its own for the policy itself"""
    next_runs: frozenset[str] | None
    """runs that the child was trained on; None if they are not all known"""

    def place(self, run: str, version: int) -> int:
        """The sampling version of a run as a version of the lineage with the same distance to the policy."""
        beyond = version - self.version
        in_lineage = version <= self.until and (self.next_runs is None or run in self.next_runs)
        return version if beyond <= 0 or in_lineage else self.version - beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A policy with its ancestors, and the runs that they were trained on."""

    weights: tuple[AncestorWeights, ...]
    """of the policy first, then of its ancestors"""
    learned_from: frozenset[str]
    """runs that any of them was trained on, as far as known"""

    @property
    def version(self) -> int:
        return self.weights[0].version

    def policy_version(self, run: Trajectory | RunFacts) -> int | None:
        """Version of the policy that sampled the oldest turn of a run, in this lineage; None if unknown.

        Negative for weights that are more updates away than the policy has.
        """
        by_id = {weights.id: weights for weights in self.weights}
        versions = []
        for policy, version in _samplers(run):
            weights = by_id.get(policy)
            if weights is None:
                return None
            versions.append(weights.place(run.id, version))
        return min(versions, default=None)


def _samplers(run: Trajectory | RunFacts) -> Iterator[tuple[str, int]]:
    """Policy id and version of each turn."""
    if isinstance(run, RunFacts):
        return ((turn.policy_id, turn.policy_version) for turn in run.turns)
    return ((turn.completion.policy_id, turn.completion.policy_version) for turn in run.turns)


def lineage(opened: OpenedWeights) -> Lineage:
    """The lineage of the opened weights, as far back as checkpoints are found on this machine."""
    own = AncestorWeights(
        id=opened.loaded.id, version=opened.version, until=opened.version, next_runs=frozenset()
    )
    lineage, learned = [own], set[str]()
    for manifest, parent in _parents(opened.manifest):
        runs, whole = _runs(manifest)
        learned |= runs
        if parent is None:
            break
        lineage.append(
            AncestorWeights(
                id=parent.id,
                version=parent.version,
                until=manifest.policy_version,
                next_runs=frozenset(runs) if whole else None,
            )
        )
    return Lineage(weights=tuple(lineage), learned_from=frozenset(learned))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parent:
    id: str
    version: int


def _parents(manifest: Manifest | None) -> Iterator[tuple[Manifest, _Parent | None]]:
    """Each checkpoint of the lineage with the weights that it was trained from; None if those are missing."""
    for _ in range(_GENERATIONS):
        if manifest is None:
            return
        above = _manifest(manifest.parent)
        # a full checkpoint names its starting weights; a model that is no checkpoint must be read
        identity = manifest.base_model if above and manifest.kind == "full" else _identity(manifest.parent)
        version = above.policy_version if above else 0
        known = identity is not None and version <= manifest.policy_version
        yield manifest, _Parent(id=identity, version=version) if known and identity else None
        if not known:
            return
        manifest = above


def _manifest(name: str | None) -> Manifest | None:
    if name is None:
        return None
    try:
        return read_checkpoint(resolve_checkpoint(name), verify=False)
    except CheckpointError:  # not a checkpoint, or deleted
        return None


def _identity(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return weights_id(name)
    except (OSError, UsageError):
        return None


def _runs(manifest: Manifest) -> tuple[set[str], bool]:
    """The runs that a checkpoint was trained on, and whether these are all of them.

    The manifest lists at most a thousand; the folder of the training lists all.
    """
    listed = set(manifest.trained_on.run_ids)
    used = checkpoints_dir().parent / "trainings" / manifest.name / USED
    if (checkpoints_dir() / manifest.name / MANIFEST).is_file() and used.is_file():
        listed |= {run for line in read_used(used) for group in line["groups"] for run in group["runs"]}
    return listed, len(listed) >= manifest.trained_on.runs
