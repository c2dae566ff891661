"""`nano-rl export`: token rows of logged runs for other trainers.

Columns: prompt_ids [P], completion_ids [C], completion_mask [C] (1 on sampled tokens), logprobs [C] and
advantages [C] (0 where the mask is 0), reward, temperature, policy versions, run and task.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from nano_coder.commands.options import PolicyChoice, SinceChoice, TaskChoice, open_log
from nano_coder.verify.trainable import RefusalCode, verify
from nano_rl.commands.options import Log
from nano_rl.learn.advantages import group_advantages, group_samples
from nano_rl.learn.groups import Group, TrainSample
from nano_rl.learn.objectives import Baseline, Std
from nano_shared.errors import UsageError
from nano_shared.files import new_file
from nano_shared.printable import printable
from nano_shared.run_facts import ChosenRuns, moment
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


def command(
    name: Annotated[Literal["tokens"], Option("--format", help="What a row holds.")] = "tokens",
    task: TaskChoice = None,
    since: SinceChoice = None,
    policy: PolicyChoice = None,
    out: Annotated[Path | None, Option("-o", "--out", help="New .jsonl file; else standard output.")] = None,
    baseline: Annotated[
        Literal["mean", "rloo", "none"],
        Option(help="What is taken from a reward; with none, runs that are alone come too."),
    ] = "mean",
    log: Log = None,
) -> int:
    """Write what the log's runs teach by comparison with each other, one task in memory at a time.

    A row has prompt_ids, completion_ids, completion_mask, logprobs, advantages and reward; preference pairs
    are written by nano-rl preferences build.
    """
    choice = ChosenRuns(task=task, since=moment(since), policy=policy)
    refused, written = Counter[str](), 0
    with open_log(log) as store, new_file(out) as file:
        for _, ids in groupby(choice.ids(store, by_task=True), key=lambda found: found[1]):
            runs = _consented(store, [run for run, _ in ids], refused)
            for row in token_rows(runs, refused, baseline=baseline):
                file.write(json.dumps(row) + "\n")
                written += 1
        if not written:
            raise UsageError(
                "no run of the log can be compared with another of its task: it takes two that are graded and"
                " earned different rewards; see nano-coder log list"
            )
    for reason, count in refused.most_common():
        print(f"left out: {count} ({printable(reason)})", file=sys.stderr)
    if out is not None:
        print(f"{written} rows in {out}")
    return 0


def _consented(store: LogStore, ids: Sequence[str], refused: Counter[str]) -> Iterator[Trajectory]:
    for run_id in ids:
        run = store.get(run_id)
        if store.withholds(run):
            refused[RefusalCode.NO_CONSENT.value] += 1
        else:
            yield run


# findings about the serving profile do not matter to a trainer that takes the tokens as they are
_IGNORED = frozenset({"other profile", "calls differ from text"})


def token_rows(
    runs: Iterable[Trajectory], refused: Counter[str], *, baseline: Baseline = "mean", std: Std = "none"
) -> Iterator[dict[str, Any]]:
    """The rows of the runs of one task. Runs of different templates or profiles, and the forks of each step,
    form separate groups for the advantages. Runs without rows are counted in `refused` by reason."""
    groups: dict[tuple[str, ...], list[Trajectory]] = {}
    for run in runs:
        reason = _refusal(run)
        if reason:
            refused[reason] += 1
        else:
            key = (run.group_key, run.task.id, run.template_hash, run.profile_hash)
            groups.setdefault(key, []).append(run)
    for members in groups.values():
        group = Group(task_key=members[0].group_key, trajectories=tuple(members))
        if baseline != "none" and (group.singleton or group.dead):
            refused["lone in its group, or all of the group earned the same"] += len(members)
            continue
        rewards = dict(zip((run.id for run in members), group.rewards_G, strict=True))
        for sample in group_samples(group, group_advantages(group.rewards_G, baseline=baseline, std=std)):
            yield _row(sample, group.task.key, rewards[sample.run_id])


def _refusal(run: Trajectory) -> str | None:
    if run.task.is_control:
        return "impossible control"
    blocking = (f.kind for f in verify(run) if f.blocks and f.kind not in _IGNORED)
    return next(blocking, None)


def _row(sample: TrainSample, task: str, reward: float) -> dict[str, Any]:
    assert not math.isnan(reward)  # `group_samples` leaves out what was not scored
    start = sample.mask.index(1)
    masked = zip(sample.advantages[start:], sample.mask[start:], strict=True)
    return {
        "run": sample.run_id, "task": task, "reward": reward, "temperature": sample.temperature,
        "policy_versions": sorted({v for v, m in zip(sample.versions, sample.mask, strict=True) if m}),
        "prompt_ids": list(sample.ids[:start]), "completion_ids": list(sample.ids[start:]),
        "completion_mask": list(sample.mask[start:]), "logprobs": list(sample.logprobs[start:]),
        "advantages": [advantage * on for advantage, on in masked],
    }  # fmt: skip
