"""Sources of groups: logged trajectories that may train a policy gradient, and why the others may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nano_coder.runtime import serving_profile, verify
from nano_rl.group import Group, form_groups
from nano_rl.tasks.impossible import is_control
from nano_shared.profile import InterfaceProfile
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a log can teach: groups with a comparison in them, and a count for each reason of refusal."""

    groups: tuple[Group, ...]
    refused: Counter[str]

    @property
    def runs(self) -> int:
        return sum(len(group.trajectories) for group in self.groups)


def admit(
    store: LogStore,
    profile: InterfaceProfile,
    template_hash: str,
    *,
    rescore: Callable[[list[Trajectory]], list[Trajectory]] | None = None,
) -> Admission:
    """Groups by task key of every logged run that may train this policy.

    `rescore` gives the admitted runs the verdicts they are to be trained on, before groups are compared.
    """
    refused: Counter[str] = Counter()
    admitted = []
    for trajectory in store.trajectories():
        reason = refusal(trajectory, profile, template_hash)
        if reason:
            refused[reason] += 1
        else:
            admitted.append(trajectory)
    if rescore is not None:
        admitted = rescore(admitted)
    return Admission(groups=tuple(_comparable(admitted, refused)), refused=refused)


def refusal(trajectory: Trajectory, profile: InterfaceProfile, template_hash: str) -> str | None:
    """Why a run may not train a policy gradient under this profile and template, or None if it may."""
    if is_control(trajectory.task):
        return "impossible control"
    if trajectory.profile_hash != serving_profile(profile, trajectory.task).hash:
        return f"profile {trajectory.profile}, not {profile.name}"
    if trajectory.template_hash != template_hash:
        return "another chat template"
    blocking = next((finding for finding in verify(trajectory) if finding.blocks), None)
    return blocking.kind if blocking else None


def _comparable(trajectories: Iterable[Trajectory], refused: Counter[str]) -> Iterable[Group]:
    for group in form_groups(trajectories):
        if group.singleton:
            refused["lone in its group"] += len(group.trajectories)
        elif group.dead:
            refused["all of its group earned the same"] += len(group.trajectories)
        else:
            yield group


def report(admission: Admission) -> str:
    """What the log can teach, in lines for a person."""
    lines = [f"admitted: {admission.runs} runs in {len(admission.groups)} groups"]
    lines += [f"refused: {count} runs ({reason})" for reason, count in admission.refused.most_common()]
    return "\n".join(lines)
