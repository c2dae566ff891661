"""Preference pairs from a log: graded outcomes, feedback, edits, and scores of a judge."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from nano_coder.agent.profiles import logged_profile, serving_profile
from nano_coder.verify.trainable import RefusalCode
from nano_preferences.edit_pairs import edit_pairs
from nano_preferences.pairs import Exact, PreferencePair, TokenRow
from nano_preferences.rewards.human import opinion
from nano_rl.config import TrainConfig
from nano_rl.imitation import opens, run_messages
from nano_rl.learn.groups import to_samples
from nano_rl.logs.admission import TargetPolicy, check_runs
from nano_shared.errors import LogError
from nano_shared.logged_run import FeedbackKind
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore
from nano_shared.types import Message, Role, Split, Trajectory, Trust, outcome

PairSource = Literal["graded", "feedback", "edit", "judge", "constitution"]
SOURCES: tuple[PairSource, ...] = ("graded", "feedback", "edit")
"""the sources that need nothing but the log"""
ALONE = "no other of its task to compare with"
ONE_SIDED = "the runs of its task are all good enough, or none is"
Groups = Sequence[Sequence[Trajectory]]
RunScorer = Callable[[Groups, Counter[str]], Mapping[str, float]]
"""runs by task -> run id -> score between 0 and 1; counts runs without a score by reason"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPairs:
    """The pairs of a log, and the number of runs that made none, by reason."""

    pairs: tuple[PreferencePair, ...]
    refused: Counter[str]


def log_pairs(
    store: LogStore, *, sources: Collection[PairSource] = SOURCES, per_task: int = 4, seed: int = 0,
    scorers: Mapping[PairSource, RunScorer] | None = None,
) -> LogPairs:  # fmt: skip
    """Pairs of runs of one task under one template and profile; each names its source.

    Forks are paired with forks of the same step, whose inherited turns are their prompt. Damaged runs and
    copies of runs make no pairs.

    `graded`: a run that passed against one that did not, each run in at most one pair and at most `per_task`
    pairs per task, in a seeded order. `feedback`: `prefer` rows, and runs above 0.5 on the scale of the
    reward part `human` against runs below it. `edit`: see `edit_pairs.py`. `judge`: a score above 0.5 against
    one below. `constitution`: a run that kept all principles against one that did not. The scorers of the
    last two are in `scorers`.
    """
    refused: Counter[str] = Counter()
    blobs = store.blobs
    runs = [run for run in _whole(store, refused) if _admitted(run, refused, blobs)]
    pairs: list[PreferencePair] = []
    if "feedback" in sources:
        pairs += _preferred(store, runs, refused)
        opinions = {run.id: opinion(run.id, store.feedback(run.id)) for run in runs}
        pairs += _scored_pairs(runs, opinions, "feedback", per_task, seed, refused, blobs)
    if "edit" in sources:
        pairs += [pair for run in runs for pair in edit_pairs(store, run, refused)]
    for source, ask in (scorers or {}).items():
        worth: dict[str, float | None] = dict(ask(list(_comparable(runs).values()), refused))
        pairs += _scored_pairs(runs, worth, source, per_task, seed, refused, blobs)
    if "graded" in sources:
        graded = {run.id: outcome(run.verdict) if _trusted(run, refused) else None for run in runs}
        pairs += _scored_pairs(runs, graded, "graded", per_task, seed, refused, blobs)
    kept: dict[tuple[str | None, str | None], PreferencePair] = {}
    edits: list[PreferencePair] = []
    for pair in pairs:
        if pair.chosen_run is None:  # an edit
            edits.append(pair)
            continue
        # feedback comes first and overrides the grader for the same two runs
        if (pair.rejected_run, pair.chosen_run) not in kept:
            kept.setdefault((pair.chosen_run, pair.rejected_run), pair)
    return LogPairs(pairs=(*kept.values(), *edits), refused=refused)


def _whole(store: LogStore, refused: Counter[str]) -> Iterator[Trajectory]:
    """The runs that nothing bars and that are no copies, oldest first."""
    kept = []
    for checked in check_runs(store.facts(), TargetPolicy()):
        for run, code in checked:
            if code is not None and (code.bars or code is RefusalCode.DUPLICATE):
                refused[code.value] += 1
            else:
                kept.append((run.started, run.id))
    for _, run_id in sorted(kept):
        yield store.get(run_id)


def _admitted(run: Trajectory, refused: Counter[str], blobs: BlobStore) -> bool:
    profile = logged_profile(run)
    reason = None
    if run.stop is None or run.stop.ours:
        reason = "unfinished, or a failure of ours"
    elif not run.own_turns:
        reason = "no turns"
    elif run.task.split is Split.TEST:
        reason = "of the test split"
    elif run.task.is_control:
        reason = "impossible control"
    elif profile is None or serving_profile(profile, run.task).hash != run.profile_hash:
        reason = "made under another profile of that name"
    elif not opens(run, blobs):
        reason = RefusalCode.NO_DIRECTORY.meaning
    if reason:
        refused[reason] += 1
    return reason is None


def _trusted(run: Trajectory, refused: Counter[str]) -> bool:
    trusted = run.verdict is not None and run.verdict.trust not in (Trust.JUDGE, Trust.NONE)
    if not trusted:
        refused["no verdict that can be trusted"] += 1
    return trusted


def _preferred(
    store: LogStore, runs: Sequence[Trajectory], refused: Counter[str]
) -> Iterator[PreferencePair]:
    by_id = {run.id: run for run in runs}
    for run in runs:
        for row in store.feedback(run.id):
            if row.kind is not FeedbackKind.PREFER:
                continue
            try:
                other = by_id.get(store.resolve(row.text or ""))
            except LogError:
                other = None
            if other is None:
                refused["preferred to a run that is not in the log, or refused"] += 1
            elif other.task.key != run.task.key:
                refused["preferred to a run of another task"] += 1
            else:
                yield from _pair(run, other, "feedback", refused, store.blobs)


def _scored_pairs(
    runs: Iterable[Trajectory], worth: dict[str, float | None], source: PairSource, per_task: int, seed: int,
    refused: Counter[str], blobs: BlobStore,
) -> Iterator[PreferencePair]:  # fmt: skip
    """Pairs by score. Graded, constitution: 1 against less than 1; otherwise above 0.5 against below 0.5."""
    passed = 1.0 if source in ("graded", "constitution") else 0.5
    known = {run: value for run, value in worth.items() if value is not None}
    for key, members in _comparable(run for run in runs if run.id in known).items():
        good = [run for run in members if known[run.id] > 0.5 and known[run.id] >= passed]
        bad = [run for run in members if known[run.id] < passed]
        if not (good and bad):
            refused[f"{source}: {ALONE if len(members) == 1 else ONE_SIDED}"] += len(members)
            continue
        for side in (good, bad):
            Random(f"pairs {seed} {key[0]}").shuffle(side)
        for chosen, rejected in list(zip(good, bad, strict=False))[:per_task]:
            yield from _pair(chosen, rejected, source, refused, blobs)


def _comparable(runs: Iterable[Trajectory]) -> dict[tuple[object, ...], list[Trajectory]]:
    """Groups of one group key, task content, template and profile, all with tokens or none."""
    groups: dict[tuple[object, ...], list[Trajectory]] = defaultdict(list)
    for run in runs:
        under = (run.template_hash, run.profile_hash, run.has_tokens)
        groups[run.group_key, run.task.id, *under].append(run)
    return groups


def _pair(
    chosen: Trajectory, rejected: Trajectory, source: PairSource, refused: Counter[str], blobs: BlobStore
) -> Iterator[PreferencePair]:
    # if one is a fork of the other, or both are forks of one run, they differ after the inherited turns
    shared = max(chosen.inherited, rejected.inherited)
    if chosen.turns[:shared] != rejected.turns[:shared]:
        refused["they went on from different steps"] += 1
        return
    chosen, rejected = (run.model_copy(update={"parent_step": shared}) for run in (chosen, rejected))
    if not (chosen.own_turns and rejected.own_turns):
        refused["one has nothing after the step that the other went on from"] += 1
        return
    prompt, answer = _conversation(chosen, blobs)
    _, other = _conversation(rejected, blobs)
    exact = _exact(chosen, rejected)
    if answer == other or (exact is not None and exact.chosen == exact.rejected):
        refused["both runs say the same"] += 1
        return
    yield PreferencePair(
        prompt=prompt, chosen=answer, rejected=other, source=source, task=chosen.task.key,
        task_id=chosen.task.id, split=chosen.task.split, chosen_run=chosen.id,
        rejected_run=rejected.id, exact=exact,
    )  # fmt: skip


def pair_of(chosen: Trajectory, rejected: Trajectory, blobs: BlobStore) -> PreferencePair | None:
    """The pair of two runs of one task, with source graded; None if both have the same text."""
    return next(_pair(chosen, rejected, "graded", Counter(), blobs), None)


def _conversation(run: Trajectory, blobs: BlobStore) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages before the first own completion, and those from it to the last completion."""
    messages = run_messages(run, logged_profile(run), blobs)
    said = [i for i, m in enumerate(messages) if m.role is Role.ASSISTANT]
    asides = sum(turn.is_aside for turn in run.turns[: run.inherited])  # which are not among them
    first, last = said[run.inherited - asides], said[-1]
    return tuple(messages[:first]), tuple(messages[first : last + 1])


def _exact(chosen: Trajectory, rejected: Trajectory) -> Exact | None:
    """The logged tokens of both runs, if both have tokens under one template."""
    if not (chosen.has_tokens and rejected.has_tokens and chosen.template_hash == rejected.template_hash):
        return None
    samples = (to_samples(run, 1.0, imitation=True) for run in (chosen, rejected))
    sides = [tuple(TokenRow(ids=row.ids, mask=row.mask) for row in rows) for rows in samples]
    return Exact(template_hash=chosen.template_hash, chosen=sides[0], rejected=sides[1])


def pairs_beside(
    stores: Sequence[LogStore], rest: set[str], usable: set[str], config: TrainConfig
) -> tuple[PreferencePair, ...]:
    """Pairs for `logs.lambda_preference`: outcomes of one task in `rest` or `usable`, one in `rest`."""
    if config.logs.lambda_preference == 0 or not rest:
        return ()
    found: dict[tuple[str | None, str | None], PreferencePair] = {}
    for store in stores:
        for pair in log_pairs(store, sources=("graded",), seed=config.seed).pairs:
            sides = {str(pair.chosen_run), str(pair.rejected_run)}
            if sides & rest and sides <= rest | usable:
                found[pair.chosen_run, pair.rejected_run] = pair
    return tuple(found.values())
