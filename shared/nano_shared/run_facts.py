"""Facts of a run: everything that decides whether it may train, without texts and token values.

`facts_of` computes them from a trajectory; `fact_rows.py` streams the same type from a log's columns, where
nothing is validated and damage is a fact too.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from nano_shared.types import REDACTED_ID, StopReason, Task, ToolSpec, Trajectory, Turn, Verdict, group_key

OPINIONS = ("accept", "reject", "edit", "thumb", "prefer")
"""kinds of feedback that rate a run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    id: str
    key: str
    split: str | None
    tools: tuple[str, ...] | None
    generator: str | None
    """generator in the task's provenance"""
    answer_only: bool
    """its verdicts are computed from the answer alone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    index: int
    policy_id: str
    policy_version: int
    finish: str
    row: int | None
    """None where the turn has no tokens"""
    context: int
    """number of context tokens, as stored"""
    sampled: int
    claimed: tuple[int, int]
    """numbers of context and sampled tokens that were counted when the turn was written"""
    whole: bool
    """whether the stored bytes are whole ids and log-probs"""
    logprobs: array[float]
    redacted: bool
    """whether an id of context or sample was redacted"""
    temperature: float
    filtered: bool
    """whether it was sampled under top-p or top-k"""
    constrained: bool
    """whether a grammar forbade tokens, or a client shaped their distribution"""
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    summary: bool
    """whether it summarises its row: calls in its text were not executed"""
    delegated_by: int | None
    """of a sub-agent: index of the turn that delegated to it"""
    draw: bytes
    """digest of what was sampled and when: equal for copies of a turn, different for any two samples"""
    no_tokens: str | None = None
    """why a server's answer has no tokens, as far as is known"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictFacts:
    reward: float | None
    trust: str
    failure_kind: str | None
    grader: str
    graded_hash: str
    components: Mapping[str, float | None]
    tampering: Sequence[Any]
    """findings as JSON"""
    sealed: bool | None = field(default=None, compare=False)
    """whether its row is as it was written; None: not read from a log, or written before there were seals"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    id: str
    task: TaskFacts
    policy: str
    profile: str
    profile_hash: str
    template_hash: str
    tools_hash: str
    parent: str | None
    parent_step: int | None
    stop: StopReason | None
    answer: str | None
    started: float
    turns: tuple[TurnFacts, ...]
    verdict: VerdictFacts | None
    given_tools: tuple[ToolSpec, ...] = ()
    """tools beside those of the profile"""
    opinions: bool = False
    """whether feedback rates the run"""

    @property
    def own_turns(self) -> tuple[TurnFacts, ...]:
        """The turns, without those that a fork took over from its parent."""
        return self.turns[self.parent_step or 0 :]

    @property
    def group_key(self) -> str:
        """`Trajectory.group_key`"""
        return group_key(self.task.key, self.parent, self.parent_step)

    @property
    def has_tokens(self) -> bool:
        return bool(self.turns) and all(turn.row is not None for turn in self.turns)

    @property
    def reward(self) -> float | None:
        return self.verdict.reward if self.verdict else None

    @property
    def draw(self) -> bytes:
        """Digest of the whole run: equal for copies of one execution, whatever their ids."""
        digest = hashlib.blake2b(digest_size=16)
        for turn in self.turns:
            digest.update(turn.draw)
        return digest.digest()


def facts_of(trajectory: Trajectory) -> RunFacts:
    """The facts of a trajectory."""
    names = ("id", "policy", "profile", "profile_hash", "template_hash", "tools_hash", "parent",
             "parent_step", "stop", "answer", "started", "given_tools")  # fmt: skip
    return RunFacts(
        task=task_facts(trajectory.task),
        turns=tuple(map(_turn_facts, trajectory.turns)),
        verdict=_verdict_facts(trajectory.verdict) if trajectory.verdict else None,
        **{name: getattr(trajectory, name) for name in names},
    )


def task_facts(task: Task) -> TaskFacts:
    return TaskFacts(
        id=task.listed.id,
        key=task.key,
        split=task.split,
        tools=task.tools,
        generator=task.provenance.generator,
        answer_only=task.hidden is not None and task.hidden.kind == "answer",
    )


def draw_digest(sampled: bytes, policy_id: str, seed: int | None, started: float, ended: float) -> bytes:
    """Digest of one turn: its sampled ids as stored, and what distinguishes it from another with the same
    ids.

    That is seed and policy, since reusing a seed gives no new sample; without a seed, the times in unix
    seconds.
    """
    # databases do not keep a minus zero
    stamp = repr((started + 0.0, ended + 0.0) if seed is None else (policy_id, seed))
    digest = hashlib.blake2b(stamp.encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(sampled)
    return digest.digest()


def _turn_facts(turn: Turn) -> TurnFacts:
    completion = turn.completion
    tokens, sampling = completion.tokens, completion.sampling
    context = tokens.context_ids if tokens else ()
    sampled = tokens.sampled_ids if tokens else ()
    packed = struct.pack(f"<{len(sampled)}I", *sampled)
    drawn = packed if tokens else completion.text.encode("utf-8", "surrogatepass")
    return TurnFacts(
        index=turn.index,
        policy_id=completion.policy_id,
        policy_version=completion.policy_version,
        finish=completion.finish,
        row=tokens.row if tokens else None,
        context=len(context),
        sampled=len(sampled),
        claimed=(len(context), len(sampled)),
        whole=True,
        redacted=REDACTED_ID in context or REDACTED_ID in sampled,
        logprobs=array("d", tokens.logprobs if tokens else ()),
        temperature=sampling.temperature,
        filtered=sampling.top_p < 1 or sampling.top_k > 0,
        constrained=sampling.grammar is not None or sampling.shaping is not None,
        text=completion.text,
        calls=tuple((call.name, call.arguments) for call in turn.calls),
        summary=turn.is_summary,
        delegated_by=turn.delegated_by,
        draw=draw_digest(drawn, completion.policy_id, sampling.seed, turn.started, turn.ended),
        no_tokens=completion.api.no_tokens if completion.api and not tokens else None,
    )


def _verdict_facts(verdict: Verdict) -> VerdictFacts:
    names = (field.name for field in fields(VerdictFacts) if field.name not in ("tampering", "sealed"))
    found = [finding.model_dump() for finding in verdict.tampering]
    return VerdictFacts(tampering=found, **{name: getattr(verdict, name) for name in names})
