"""Rewards that a command writes into a file, as Harbor's verifiers do; the file is not trusted.

The command runs in a fresh jail on the original files plus the agent's changes. It shares the jail with the
solution, so the trust is USER_CHECK. A reward counts if the command ended by itself, and if the work earns
less from an impossible variant of the check. A file that is missing, malformed, not finite or outside [0, 1]
earns 0 if the command works on the original files, and is our failure if it does not.
"""

from __future__ import annotations

import json
import math
import posixpath
from dataclasses import dataclass
from pathlib import Path

from nano_coder.grading import GRADER
from nano_coder.grading.command_check import (
    CommandRun,
    Ran,
    Reader,
    passes_the_impossible,
    restored,
    tree_hash,
)
from nano_coder.sandbox.protocol import ExecResult, Jail
from nano_shared.errors import SandboxError, UsageError
from nano_shared.hidden_checks import RewardFileChecks
from nano_shared.printable import printable
from nano_shared.snapshot import Snapshot, clean_path
from nano_shared.types import Tampering, Trust, Verdict

_FETCH = (Path(__file__).parent / "inside" / "fetch_file.py").read_text(encoding="utf-8")


class BadReward(Exception):
    """The reward file is missing or invalid."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class _Written:
    result: ExecResult
    rewards: dict[str, float]
    problem: BadReward | None


def grade_reward_file(
    hidden: RewardFileChecks,
    check: CommandRun,
    before: Snapshot,
    after: Snapshot,
    *,
    editable: tuple[str, ...] = (),
) -> Verdict:
    """Raises SandboxError if the sandbox failed, or the command leaves no reward on the original files."""
    path = reward_path(hidden.reward_path)
    start = _without(before, path)[0]
    work = restored(check.command, before, after, check.blobs, editable)
    tree, planted = _without(work.tree, path)
    found = [*work.found, *planted]
    ran = check.run(tree, keep=(_fetched(path),))
    written = _written(ran, path)
    if written.problem is not None and not written.result.timed_out:
        original = _written(check.run(start, keep=(_fetched(path),)), path)
        if original.problem is not None:
            raise SandboxError(f"the command leaves no reward on the original either: {original.problem}")
        if written.problem.kind in ("link", "read_only"):
            found.append(Tampering(kind="reward_written", detail=str(written.problem)))
    reward = 0.0 if written.problem or written.result.timed_out else written.rewards["reward"]
    forged = _ended_early(ran)
    if reward and not forged:
        forged = passes_the_impossible(
            check,
            work,
            tree,
            hidden.files,
            lambda control: _written(control, path).rewards.get("reward", 0.0) >= reward,
            (_fetched(path),),
        )
    found += forged
    others = {name: value for name, value in written.rewards.items() if name != "reward"}
    return Verdict(
        reward=0.0 if planted or forged else reward,
        components={"tests": reward, **others},
        checks={
            "reward_file": "timeout" if written.result.timed_out else "error" if written.problem else "pass"
        },
        tampering=tuple(found),
        failure_kind=_failure(written),
        trust=Trust.USER_CHECK,
        grader=GRADER,
        graded_hash=tree_hash(tree),
    )


def reward_path(path: str) -> str:
    """The path relative to the workspace. Raises UsageError if it leads out of it."""
    plain = posixpath.normpath(path.removeprefix("/work/"))
    if plain.startswith(("/", "..")) or plain == ".":
        raise UsageError(f"reward_path {path!r} must be a file of the workspace, by its relative path")
    return clean_path(plain)


def read_reward(text: str) -> dict[str, float]:
    """The rewards by name, `reward` among them. Raises BadReward for values that are no numbers in [0, 1]."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadReward("reward_malformed", f"{text[:60]!r} is neither a number nor a JSON object") from None
    named = value if isinstance(value, dict) else {"reward": value}
    for name, number in named.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadReward("reward_malformed", f"{name} is {number!r}, which is no number")
        if not math.isfinite(number) or not 0 <= number <= 1:
            raise BadReward("reward_out_of_range", f"{name} is {number}, outside of [0, 1]")
    if "reward" not in named and len(named) != 1:
        raise BadReward("reward_malformed", f"none of {sorted(named)} is called `reward`")
    rewards = {printable(str(name)): float(number) for name, number in named.items()}
    return rewards if "reward" in rewards else {**rewards, "reward": next(iter(rewards.values()))}


def _without(tree: Snapshot, path: str) -> tuple[Snapshot, list[Tampering]]:
    """The tree without anything at the reward's path, and without links on the way to it."""
    parents = {path.rsplit("/", depth)[0] for depth in range(1, path.count("/") + 1)}
    there = [e for e in tree.entries if e.path == path or e.path.startswith(f"{path}/")]
    there += [e for e in tree.entries if e.path in parents and e.kind != "dir"]
    removed = {entry.path for entry in there}
    kept = Snapshot(tuple(entry for entry in tree.entries if entry.path not in removed))
    what = f"{printable(path)} was there before the command ran; it was removed"
    return kept, [Tampering(kind="reward_written", detail=what)] if there else []


def _ended_early(ran: Ran) -> list[Tampering]:
    """The finding if a signal ended the command, other than at its time limit."""
    if ran.result.timed_out or ran.result.oom or ran.result.signal is None:
        return []
    what = f"signal {ran.result.signal} ended the command before it had decided"
    return [Tampering(kind="child_killed", detail=what)]


def _fetched(path: str) -> Reader:
    def fetch(jail: Jail) -> str:
        fetched = jail.run_python(_FETCH, [f"/work/{path}"], isolated=True, timeout=30.0)
        try:
            json.loads(fetched.stdout)
        except ValueError:
            raise SandboxError(f"the reward could not be fetched: {fetched.stderr[-300:]!r}") from None
        return fetched.stdout.decode()

    return fetch


def _written(ran: Ran, path: str) -> _Written:
    result, fetched_json = ran.result, json.loads(ran.kept[0])
    if "problem" in fetched_json:
        return _Written(result, {}, BadReward(fetched_json["problem"], f"{path}: {fetched_json['detail']}"))
    try:
        return _Written(result, read_reward(fetched_json["text"]), None)
    except BadReward as problem:
        return _Written(result, {}, problem)


def _failure(written: _Written) -> str | None:
    if written.result.timed_out:
        return "agent_timeout"
    return None if written.problem is None else f"{written.problem.kind}: {printable(str(written.problem))}"
