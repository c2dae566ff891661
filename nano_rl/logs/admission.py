"""Admission: what each logged run may teach, and the one reason why not more.

Two looks. The first reads the facts of a run off the columns of the log, so that a hundred thousand take
seconds; the second loads the run and holds its tokens against the policy's tokenizer and template, and its
log-probs against the weights, where they are the ones that sampled it. `train --from-logs` takes both looks
at every run; `nano-rl admit` takes the second at a sample, or at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from nano_coder.agent.profiles import serving_profile
from nano_coder.verify.refusal import Refusal
from nano_coder.verify.trainable import blocking
from nano_coder.verify.trainable import hashes as profile_hashes
from nano_rl.learn.rows.group import is_dead
from nano_rl.rewards import outcome
from nano_shared.facts import RunFacts, TaskFacts
from nano_shared.profile import InterfaceProfile
from nano_shared.types import CONTROL_GENERATOR, Split, Task, Trust

_UNTRUSTED = (Trust.JUDGE, Trust.NONE)
"""verdicts that prefer no run to another"""
Look = Callable[[RunFacts], Refusal | None]
Looked = tuple[RunFacts, Refusal | None]


class Use(StrEnum):
    """The best use of a run."""

    POLICY_GRADIENT = "policy gradient"
    PREFERENCE = "preference"
    """better or worse than another run of its task, though it cannot train a policy gradient"""
    IMITATION = "imitation"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The policy that runs are judged for; None is any, where no model is at hand."""

    profile: InterfaceProfile | None = None
    template_hash: str | None = None
    version: int | None = None
    """optimizer steps behind its weights"""
    max_staleness: int | None = None
    """in such steps; None admits runs of any age"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run, what it may be used for, and why for no more; `refusal` is None of policy gradients alone."""

    run: RunFacts
    use: Use
    refusal: Refusal | None


def refusal_of(run: RunFacts, bench: Bench) -> Refusal | None:
    """Why a run may not train a policy gradient, whatever the others of its group are; the first reason.

    Damage comes first: what the log does not hold right is no reason to look further.
    """
    found = list(blocking(run))
    damage = next((code for code in found if code.damage), None)
    if damage:
        return damage
    if run.task.generator == CONTROL_GENERATOR:
        return Refusal.CONTROL
    if run.task.split == Split.TEST:
        return Refusal.TEST_SPLIT
    if Refusal.OTHER_PROFILE in found:
        return Refusal.OTHER_PROFILE
    if bench.profile is not None and _speaks(bench.profile, run.task) != run.profile_hash:
        return Refusal.ANOTHER_PROFILE
    if Refusal.TEXT_ONLY in found:
        return Refusal.TEXT_ONLY
    if bench.template_hash not in (None, run.template_hash):
        return Refusal.ANOTHER_TEMPLATE
    return next(iter(found), None) or _stale(run, bench)


def serving(profile: InterfaceProfile, task: TaskFacts) -> InterfaceProfile:
    """The profile that would serve the task."""
    return (
        serving_profile(profile, Task(key=task.key, prompt="-", tools=task.tools)) if task.tools else profile
    )


def _speaks(profile: InterfaceProfile, task: TaskFacts) -> str:
    return profile_hashes(serving(profile, task))[0]


def _stale(run: RunFacts, bench: Bench) -> Refusal | None:
    if bench.version is None or bench.max_staleness is None:
        return None
    oldest = min(turn.policy_version for turn in run.turns)
    return Refusal.STALE if bench.version - oldest > bench.max_staleness else None


def _refuse_copies(runs: Sequence[Looked]) -> list[Looked]:
    """Of the runs of one key, oldest first, copies of an earlier one and runs of an earlier task leave."""
    current = {run.group_key: run.task.id for run, _ in runs}
    seen: set[bytes] = set()
    judged = []
    for run, refusal in runs:
        if refusal is None or not refusal.damage:
            if run.turns and run.draw in seen:
                refusal = Refusal.DUPLICATE
            elif refusal is None and run.task.id != current[run.group_key]:
                refusal = Refusal.OTHER_TASK
            seen.add(run.draw)
        judged.append((run, refusal))
    return judged


def uncomparable(rewards: Sequence[float]) -> Refusal | None:
    """Why runs of one task with these rewards teach a policy gradient nothing, or None if they do."""
    if len(rewards) < 2:
        return Refusal.LONE
    return Refusal.SAME_REWARD if is_dead(tuple(rewards)) else None


def by_task(
    facts: Iterable[RunFacts], bench: Bench, second_look: Look | None = None
) -> Iterator[list[Judged]]:
    """The runs of each task, judged; `facts` has the runs of a task side by side, oldest first.

    `second_look` is taken at each run that the first admits.
    """
    for looked in looked_at(facts, bench, second_look):
        yield _used(looked)


def looked_at(
    facts: Iterable[RunFacts], bench: Bench, second_look: Look | None = None
) -> Iterator[list[Looked]]:
    """As `by_task`, before the runs of a task are compared: None of each that may train."""
    for _, members in groupby(facts, key=lambda run: run.task.key):
        looked = _refuse_copies([(run, refusal_of(run, bench)) for run in members])
        if second_look is not None:
            looked = [(run, second_look(run) if code is None else code) for run, code in looked]
        yield looked


def _used(runs: Sequence[Looked]) -> list[Judged]:
    """The use of each run of one task."""
    rewards: dict[str, list[float]] = {}
    for run, code in runs:
        if code is None and run.reward is not None:
            rewards.setdefault(run.group_key, []).append(run.reward)
    alone = {key: uncomparable(of_group) for key, of_group in rewards.items()}
    left = [(run, code or alone.get(run.group_key)) for run, code in runs]
    opposed = _opposed(run for run, code in left if not _worthless(code))
    judged = []
    for run, code in left:
        use = Use.NOTHING
        if code is None:
            use = Use.POLICY_GRADIENT
        elif not _worthless(code):
            if run.id in opposed or run.opinions:
                use = Use.PREFERENCE
            elif outcome(run.verdict) == 1.0:
                use = Use.IMITATION
        judged.append(Judged(run=run, use=use, refusal=code))
    return judged


_WORTHLESS = (Refusal.UNFINISHED, Refusal.OURS, Refusal.NO_TURNS, Refusal.CONTROL, Refusal.TEST_SPLIT,
              Refusal.OTHER_PROFILE, Refusal.DUPLICATE, Refusal.OTHER_TASK)  # fmt: skip
"""besides damage, what a run can teach nothing by at all"""


def _worthless(code: Refusal | None) -> bool:
    return code is not None and (code.damage or code in _WORTHLESS)


def may_imitate(run: RunFacts, code: Refusal) -> bool:
    """Whether a run that may not train a policy gradient can be imitated by the policy."""
    return not _worthless(code) and code is not Refusal.ANOTHER_PROFILE and outcome(run.verdict) == 1.0


def _opposed(runs: Iterable[RunFacts]) -> set[str]:
    """Runs whose outcome another has not, of those that could stand in one pair: read under one template."""
    sides: dict[tuple[str, str, bool], tuple[list[str], list[str]]] = {}
    for run in runs:
        value = outcome(run.verdict)
        if value is not None and run.verdict is not None and run.verdict.trust not in _UNTRUSTED:
            kind = (run.template_hash, run.profile_hash, run.has_tokens)
            sides.setdefault(kind, ([], []))[value == 1.0].append(run.id)
    return {run for bad, good in sides.values() if bad and good for run in (*bad, *good)}
