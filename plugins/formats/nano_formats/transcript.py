"""A run put together from another agent's transcript: what was said, written, called and answered, in order.

Without tokens it is a text-only run: it can be imitated, it trains no policy gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import ORIGINAL_OPENING, ORIGINAL_TOOLS
from nano_coder.run_formats import SAID_BY_USER
from nano_formats.token_triple import TokenRows, Triple
from nano_shared.errors import Refused
from nano_shared.files import content_hash
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import refusing_invalid
from nano_shared.types import (
    Completion,
    Finish,
    Message,
    Observation,
    Provenance,
    Role,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)


def iso(seconds: float | None) -> str | None:
    """ISO 8601 in UTC; None for a moment that no calendar holds."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


def unix(text: object, unknown: float, field: str) -> float:
    """Unix seconds of an ISO 8601 time; `unknown` where there is none. Raises Refused for what is no time."""
    if text is None:
        return unknown
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        raise Refused(field, f"{text!r:.60} is no ISO 8601 time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


IMPORTED = "imported"
"""profile of runs that another agent made; no policy of ours is served under it"""
_DIALECT = "hermes"
_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_LENGTH = 24


@dataclass(slots=True)
class Step:
    """One call of the model and what came back."""

    started: float
    model: str | None = None
    key: str | None = None
    """id of the model's message, where parts of it come apart"""
    said: list[str] = field(default_factory=list)
    reasoned: list[str] = field(default_factory=list)
    calls: dict[str, ToolCall] = field(default_factory=dict)
    answers: dict[str, Observation] = field(default_factory=dict)
    after: list[Observation] = field(default_factory=list)
    """what the user said next"""
    triple: Triple | None = None
    finish: Finish = Finish.STOP
    ended: float = 0.0

    @property
    def closed(self) -> bool:
        return bool(self.answers or self.after)


@dataclass(slots=True, kw_only=True)
class Transcript:
    format: str
    agent: str
    """the agent's name and version"""
    model: str = "unknown"
    opening: list[Message] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    now: float = 0.0
    """unix seconds of what is read next; a transcript without times keeps the last one"""

    def tell(self, role: Role, text: str) -> None:
        """A message that the model did not write."""
        if not self.steps:
            self.opening.append(Message(role=role, content=text))
        else:
            self.steps[-1].after.append(self._observation(SAID_BY_USER, text))

    def step(self, *, key: str | None = None, model: str | None = None, fresh: bool = False) -> Step:
        """The step being written: a new one after an answer, under another key, or where `fresh`."""
        last = self.steps[-1] if self.steps else None
        other = last is not None and key is not None and last.key is not None and key != last.key
        if last is None or fresh or last.closed or other:
            last = Step(self.now, model=model, key=key)
            self.steps.append(last)
        last.ended = self.now
        return last

    def call(self, step: Step, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Raises Refused for an id that the step has used."""
        if call_id in step.calls:
            raise Refused("call_id", f"{call_id!r} is used twice")
        step.calls[call_id] = ToolCall(name=name, arguments=arguments)

    def answer(self, call_id: str, text: str, *, ok: bool = True) -> None:
        """The result of a call. Raises Refused where no step made the call."""
        step = next((s for s in reversed(self.steps) if call_id in s.calls), None)
        if step is None:
            raise Refused("call_id", f"{call_id!r} answers no call")
        step.answers[call_id] = self._observation(step.calls[call_id].name, text, ok=ok)

    def run(
        self,
        source: Any,
        *,
        stop: StopReason = StopReason.FINISHED,
        sampling: Sampling | None = None,
        verdict: Verdict | None = None,
    ) -> LoggedRun:
        """The run, its id a function of `source`, so that an import twice is an import once. Raises Refused
        for a transcript in which nobody asked or nobody answered."""
        prompt = "\n\n".join(m.content for m in self.opening if m.role is Role.USER)
        if not prompt.strip():
            raise Refused("prompt", "nobody asks for anything before the model's first words")
        if not self.steps:
            raise Refused("steps", "the model never says anything")
        started = self.steps[0].started
        rows = TokenRows()
        with refusing_invalid():
            turns = (self._turn(i, step, sampling or Sampling(), rows) for i, step in enumerate(self.steps))
            trajectory = Trajectory(
                id=import_id(started, content_hash([self.format, source])), task=self._task(prompt),
                turns=tuple(turns), stop=stop, runtime_version=self.agent, profile=IMPORTED,
                profile_hash=content_hash([self.format, self.agent]), template_hash="unknown",
                tools_hash=content_hash(self.tools or []), policy=self.model, started=started,
                ended=self.steps[-1].ended,
            )  # fmt: skip
        return LoggedRun(trajectory=trajectory, verdicts=(verdict,) if verdict else ())

    def _task(self, prompt: str) -> Task:
        original: dict[str, Any] = {
            ORIGINAL_OPENING: [{"role": m.role.value, "content": m.content} for m in self.opening]
        }
        if self.tools:
            original[ORIGINAL_TOOLS] = self.tools
        # equal tasks have equal keys, and others have others: groups form by key
        digest = content_hash([prompt, original]).removeprefix("sha256:")
        provenance = Provenance(source=self.format, generator=self.agent, original=original)
        return Task(key=f"{self.format}/{digest[:16]}", prompt=prompt, provenance=provenance)

    def _turn(self, index: int, step: Step, sampling: Sampling, rows: TokenRows) -> Turn:
        thought = "\n\n".join(step.said)
        if step.reasoned:
            reasoning = "\n\n".join(step.reasoned)
            thought = "\n\n".join(filter(None, (f"<think>\n{reasoning}\n</think>", thought)))
        calls = tuple(step.calls.values())
        completion = Completion(
            text=_written(thought, calls), finish=step.finish, tokens=rows.tokens(step.triple),
            sampling=sampling, policy_id=step.model or self.model,
        )  # fmt: skip
        return Turn(
            index=index, completion=completion, thought=thought, calls=calls, parser=_DIALECT,
            observations=tuple(_ordered_answers(step)), started=step.started, ended=step.ended,
        )  # fmt: skip

    def _observation(self, tool: str, text: str, *, ok: bool = True) -> Observation:
        size = len(text.encode("utf-8", "surrogatepass"))
        return Observation(tool=tool, ok=ok, text=text, bytes_total=size, started=self.now, ended=self.now)


def _ordered_answers(step: Step) -> list[Observation]:
    """The answers in the order of the calls: one that never came stands as a failure where others follow."""
    calls, times = list(step.calls.items()), {"started": step.ended, "ended": step.ended}
    while calls and calls[-1][0] not in step.answers and not step.after:
        calls.pop()
    lost = [Observation(tool=call.name, ok=False, text="", **times) for _, call in calls]
    return [step.answers.get(id, none) for (id, _), none in zip(calls, lost, strict=True)] + step.after


def _written(thought: str, calls: tuple[ToolCall, ...]) -> str:
    """Thought and calls as one text, in the dialect that open models write."""
    if not calls:
        return thought
    dialect = DIALECTS[_DIALECT]
    try:
        return dialect.render(thought, calls, ())
    except ValueError:  # the thought quotes the dialect's own tag: nothing will read the calls back from it
        return f"{thought}\n{dialect.render('', calls, ())}"


def import_id(started: float, digest: str) -> str:
    """A run id that sorts by its start, as the others do, and is a function of the content."""
    moment = max(0, min(int(started * 1000), 2**48 - 1))
    number = moment << 72 | int(digest.removeprefix("sha256:")[:18], 16)
    digits = [_BASE32[number >> 5 * place & 31] for place in range(_ID_LENGTH)]
    return "".join(reversed(digits))
