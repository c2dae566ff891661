"""How old a logged run is: updates between the policy that sampled it and the one that is trained.

A turn names the weights that its process began from (`policy_id`) and the optimizer steps behind them
(`policy_version`). Checkpoints name their parents, so that the weights on the way to a policy are known:

    base, version 0  ->  first checkpoint, version 40  ->  the policy, version 100

A run of version 25 of the base is 75 updates old, if it was sampled on the way to the first checkpoint. One
of another training from the base turned off the way: it is 25 updates from the base, which is 100 from the
policy. Runs of weights that are not on the way have no known age.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nano_coder.models.opening import OpenedWeights, weights_id
from nano_rl.logs.used_runs import USED, read_used
from nano_shared.checkpoint import MANIFEST, Manifest, checkpoints_dir, read_checkpoint, resolve_checkpoint
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.facts import RunFacts
from nano_shared.types import Trajectory

_GENERATIONS = 1000
"""more than any line has: a circle of names ends there"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One stop on the way to a policy."""

    id: str
    version: int
    """optimizer steps behind it"""
    until: int
    """version of the next stop; its own where there is none"""
    next_runs: frozenset[str] | None
    """runs that the next stop learned from; None where they are not all known"""

    def place(self, run: str, version: int) -> int:
        """The version on the way that is as far from its end as the weights that sampled."""
        beyond = version - self.version
        on_the_way = version <= self.until and (self.next_runs is None or run in self.next_runs)
        return version if beyond <= 0 or on_the_way else self.version - beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The weights on the way to a policy, and the runs that are in them."""

    stops: tuple[Weights, ...]
    """the policy's own first"""
    learned_from: frozenset[str]
    """runs that some stop on the way learned from, as far as that is known"""

    @property
    def version(self) -> int:
        return self.stops[0].version

    def born(self, run: Trajectory | RunFacts) -> int | None:
        """The version of the policy that sampled the oldest turn, as a place on the way; None where it is
        not known. It may be negative: weights that are farther away than the way is long."""
        stops = {stop.id: stop for stop in self.stops}
        places = []
        for policy, version in _samplers(run):
            stop = stops.get(policy)
            if stop is None:
                return None
            places.append(stop.place(run.id, version))
        return min(places, default=None)


def _samplers(run: Trajectory | RunFacts) -> Iterator[tuple[str, int]]:
    """Policy and version of each turn."""
    if isinstance(run, RunFacts):
        return ((turn.policy_id, turn.policy_version) for turn in run.turns)
    return ((turn.completion.policy_id, turn.completion.policy_version) for turn in run.turns)


def lineage(opened: OpenedWeights) -> Lineage:
    """The way to the opened weights, as far back as their checkpoints lie here."""
    own = Weights(id=opened.loaded.id, version=opened.version, until=opened.version, next_runs=frozenset())
    stops, learned = [own], set[str]()
    for manifest, parent in _parents(opened.manifest):
        runs, whole = _runs(manifest)
        learned |= runs
        if parent is None:
            break
        stops.append(
            Weights(
                id=parent.id,
                version=parent.version,
                until=manifest.policy_version,
                next_runs=frozenset(runs) if whole else None,
            )
        )
    return Lineage(stops=tuple(stops), learned_from=frozenset(learned))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parent:
    id: str
    version: int


def _parents(manifest: Manifest | None) -> Iterator[tuple[Manifest, _Parent | None]]:
    """Each checkpoint on the way with the weights it was trained from; None for those that are gone."""
    for _ in range(_GENERATIONS):
        if manifest is None:
            return
        above = _manifest(manifest.parent)
        # a full checkpoint names the weights it began from; what is no checkpoint must be read
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
    except CheckpointError:  # a model of others, or one that is gone
        return None


def _identity(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return weights_id(name)
    except (OSError, UsageError):
        return None


def _runs(manifest: Manifest) -> tuple[set[str], bool]:
    """The runs that a checkpoint learned from, and whether these are all: its manifest lists a thousand,
    the folder of its training every one."""
    listed = set(manifest.trained_on.run_ids)
    told = checkpoints_dir().parent / "trainings" / manifest.name / USED
    if (checkpoints_dir() / manifest.name / MANIFEST).is_file() and told.is_file():
        listed |= _used(told)
    return listed, len(listed) >= manifest.trained_on.runs


def _used(path: Path) -> set[str]:
    return {run for line in read_used(path) for group in line["groups"] for run in group["runs"]}
