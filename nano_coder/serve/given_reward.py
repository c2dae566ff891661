"""Rewards that users give to logged runs: by a session of the server, or by `nano-coder feedback`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.store import LogStore
from nano_shared.types import Trajectory, Trust, Verdict

GRADER = "session reward 1"
MOST_REWARD = 1000.0
"""largest magnitude of a reward that a client gives: one run must not outweigh a batch of others"""
MOST_COMPONENTS = 64


def give_reward(
    store: LogStore,
    runs: Sequence[str],
    reward: float,
    components: Mapping[str, float] | None = None,
    *,
    replace: bool = False,
) -> list[str]:
    """Give this reward to those of the runs that have no verdict; with `replace` to all. Returns their ids.

    Open runs of a server's client end. Raises UsageError where each has a verdict, and for a run of nano's
    own that never ended.
    """
    chosen = [run for run in map(store.get, runs) if replace or run.verdict is None]
    if not chosen:
        named = f"run {runs[0]} has" if len(runs) == 1 else f"each of these {len(runs)} runs has"
        raise UsageError(f'{named} a verdict already; --replace, or "replace": true, gives this one too')
    for run in chosen:
        if run.stop is None and not run.is_served:
            raise UsageError(f"run {run.id} never ended; nano-coder resume {run.id} goes on with it first")
    for run in chosen:
        if run.stop is None:
            store.finish_served(run)
        store.add_verdict(run.id, _verdict(run, reward, components))
    return [run.id for run in chosen]


def _verdict(run: Trajectory, reward: float, components: Mapping[str, float] | None) -> Verdict:
    answer = run.turns[-1].completion.text if run.turns else None
    return Verdict(
        reward=reward,
        components=dict(components or {"reward": reward}),
        trust=Trust.USER_CHECK,
        grader=GRADER,
        graded_hash=content_hash(["answer", answer]),
    )
