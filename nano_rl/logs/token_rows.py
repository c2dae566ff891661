"""Token rows of logged runs for other trainers: prompt and completion ids, log-probs, reward, advantages.

Columns: prompt_ids [P], completion_ids [C], completion_mask [C] (1 on sampled tokens), logprobs [C] and
advantages [C] (0 where the mask is 0), reward, temperature, policy versions, run and task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from nano_coder.verify.trainable import verify
from nano_rl.learn.advantage import group_samples
from nano_rl.learn.config import Baseline, Std
from nano_rl.learn.rows import Group, TrainSample
from nano_shared.types import Trajectory

# findings about the serving profile do not matter to a trainer that takes the tokens as they are
_IGNORED = frozenset({"other profile", "calls differ from text"})


def token_rows(
    runs: Iterable[Trajectory], refused: Counter[str], *, baseline: Baseline = "mean", std: Std = "none"
) -> Iterator[dict[str, Any]]:
    """The rows of the runs of one task. Runs of different templates or profiles, and the forks of each step,
    form separate groups for the advantages.

    Runs without rows are counted in `refused` by reason.
    """
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
        for sample in group_samples(group, baseline=baseline, std=std):
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
        "run": sample.run_id,
        "task": task,
        "reward": reward,
        "temperature": sample.temperature,
        "policy_versions": sorted({v for v, m in zip(sample.versions, sample.mask, strict=True) if m}),
        "prompt_ids": list(sample.ids[:start]),
        "completion_ids": list(sample.ids[start:]),
        "completion_mask": list(sample.mask[start:]),
        "logprobs": list(sample.logprobs[start:]),
        "advantages": [advantage * on for advantage, on in masked],
    }
