"""Sources of groups: logged trajectories that may train a policy gradient, and why the others may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nano_coder.runtime import Refusal, blocking
from nano_rl.group import Group, form_groups
from nano_rl.logs.admission import Bench, Look, looked_at, refusal_of, uncomparable
from nano_rl.logs.second_look import SecondLook
from nano_shared.facts import RunFacts, facts_of
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
    look: SecondLook | None = None,
) -> Admission:
    """Groups by task key of every logged run that may train this policy.

    `rescore` gives the admitted runs the verdicts they are to be trained on, before groups are compared.
    `look` is taken at each run that its columns admit: give it to train, since only the policy's tokenizer
    and weights can tell a shifted mask or an invented log-prob.
    """
    refused: Counter[str] = Counter()
    admitted: list[Trajectory] = []

    def load(run: RunFacts) -> Refusal | None:
        trajectory = store.get(run.id)
        refusal = look.refusal(trajectory) if look is not None else None
        if refusal is None:
            admitted.append(trajectory)
        return refusal

    take: Look = load
    for looked in looked_at(store.facts(), Bench(profile=profile, template_hash=template_hash), take):
        refused.update(code.value for _, code in looked if code is not None)
    admitted.sort(key=lambda run: (run.started, run.id))
    if rescore is not None:
        admitted = rescore(admitted)
    return Admission(groups=tuple(_comparable(admitted, refused)), refused=refused)


def refusal(trajectory: Trajectory, profile: InterfaceProfile, template_hash: str) -> str | None:
    """Why a run may not train a policy gradient under this profile and template, or None if it may."""
    return refusal_of(facts_of(trajectory), Bench(profile=profile, template_hash=template_hash))


def undamaged(store: LogStore, refused: Counter[str]) -> Iterator[Trajectory]:
    """Every run whose columns are whole, oldest first; the others are counted by their damage."""
    whole = []
    for run in store.facts():
        damage = next((code for code in blocking(run) if code.damage), None)
        if damage is None:
            whole.append((run.started, run.id))
        else:
            refused[damage.value] += 1
    for _, run_id in sorted(whole):
        yield store.get(run_id)


def _comparable(trajectories: Iterable[Trajectory], refused: Counter[str]) -> Iterable[Group]:
    for group in form_groups(trajectories):
        scored = [reward for reward in group.rewards_G if reward == reward]
        code = uncomparable(scored)
        if code is not None:
            refused[code.value] += len(group.trajectories)
        else:
            yield group


def report(admission: Admission) -> str:
    """What the log can teach, in lines for a person."""
    lines = [f"admitted: {admission.runs} runs in {len(admission.groups)} groups"]
    lines += [f"refused: {count} runs ({reason})" for reason, count in admission.refused.most_common()]
    return "\n".join(lines)
