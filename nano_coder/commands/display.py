"""What a person sees of a run: progress on stderr, the result on stdout."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.text import Text

from nano_coder.serve.given_reward import GRADER
from nano_shared.command_line import Console
from nano_shared.printable import printable
from nano_shared.types import (
    Completion,
    Finish,
    Message,
    Observation,
    Role,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
    Verdict,
)

if TYPE_CHECKING:
    from nano_coder.run.execution import RunHooks

_FOLDED = 15
"""lines of an output on a terminal"""
_LONGEST_LINE = 400
"""characters of a line of a folded output"""


_SIGNS = {"completed": ("✓", "green"), "in_progress": ("▸", "bold cyan"), "pending": ("·", "dim")}
"""status of a plan's step -> how it is shown"""
_SHOWN = 600
"""characters of a client's message"""


def on_terminal() -> bool:
    """Whether somebody is there to ask."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class Display:
    """Prints each step as it happens; on stderr, unless the steps are the `answer`. `quiet` prints nothing.
    On a terminal long outputs are folded, unless `verbose`. Lines are wrapped by the terminal alone.
    `base_url` is that of the runs' model, which no log holds."""

    def __init__(
        self, *, quiet: bool, verbose: bool = False, answer: bool = False, base_url: str | None = None
    ) -> None:
        self._again = f" --base-url {shlex.quote(base_url)}" if base_url else ""
        self._progress = Console(stderr=not answer, quiet=quiet, soft_wrap=True)
        self._result = Console(quiet=quiet, soft_wrap=True)
        self._verbose = verbose
        self._run: str | None = None
        self._streamed = False
        """whether the step that follows has been shown as it came"""
        self._steps = 0
        self._seconds = math.inf
        """of the run; infinite once it was said that answers may not fit"""
        self._summarised = False
        """whether the step before summarised the context"""
        self._opening: tuple[Message, ...] = ()
        """the first message of a client"""

    @contextmanager
    def naming_the_run(self) -> Iterator[None]:
        """An interrupt between two steps, or while the check runs, says where what was done is."""
        try:
            yield
        except KeyboardInterrupt:
            if self._run:
                self._progress.print(f"\nrun {self._run} is in the log: nano-coder diff {self._run} shows it")
            raise

    def start(self, trajectory: Trajectory) -> None:
        self._run = trajectory.id
        self._steps = len(trajectory.turns)
        self._seconds = trajectory.task.limits.max_seconds
        how = "going on from" if trajectory.inherited else "in the place of"
        after = f", {how} {trajectory.parent}" if trajectory.parent else ""
        self._progress.print(
            Text(f"run {trajectory.id}", "bold"), f"with {printable(trajectory.policy)}{after}"
        )
        for file in trajectory.task.instructions if not trajectory.parent else ():
            how = "" if file.trusted else ", shown as untrusted data (nano-coder trust DIR lets it instruct)"
            self._progress.print(f"reads {printable(file.path)}{how}", style="dim")

    def hooks(self) -> RunHooks:
        """What shows runs as they go on, completions as they come where somebody watches."""
        from nano_coder.run.execution import RunHooks

        text = self._text if self._progress.is_terminal and not self._progress.quiet else None
        return RunHooks(start=self.start, turn=self.turn, grading=self._grading, text=text)

    def _text(self, text: str) -> None:
        if not text:
            return
        if not self._streamed:
            self._progress.print(Text(f"\nstep {self._steps + 1}", "bold cyan"))
        self._progress.print(printable(text, None), end="")
        self._streamed = True

    def turn(self, turn: Turn) -> None:
        tokens = turn.completion.tokens
        speed = _speed(turn)
        size = f"({len(tokens.sampled_ids)} tokens{f', {speed:.3g}/s' if speed else ''})" if tokens else ""
        if turn.completion.finish is Finish.LENGTH:
            most = turn.completion.sampling.max_tokens
            size = f"(cut at {most} tokens; {_MORE} max_completion_tokens=N)"
        if turn.completion.finish is Finish.REPETITION:
            size = "(ended: it repeated itself)"
        self._say_slow(turn, speed)
        title = "" if self._streamed else f"\nstep {turn.index + 1}"
        if turn.delegated_by is not None:
            title += f" (sub-agent of step {turn.delegated_by + 1})"
        self._progress.print(Text(title, "bold cyan"), size)
        self._steps = turn.index + 1
        if turn.is_summary:
            self._progress.print("the context is nearly full: its summary begins the next row", style="dim")
        elif self._summarised:
            kept = sum(message.role is Role.ASSISTANT for message in turn.messages)
            self._progress.print(f"a new row: task, summary and {kept} of the last steps", style="dim")
        elif turn.delegated_by is None:
            shown = turn.messages
            if turn.index == 0:
                self._opening = shown[:1]
            elif shown and shown[:1] == self._opening:
                told = f"a new row: the agent wrote its history anew, {len(shown)} messages; the last:"
                self._progress.print(told, style="dim")
                shown = shown[-1:]
            for message in shown:
                self._client(message)
        self._summarised = turn.is_summary
        if not self._streamed:
            self._progress.print(printable(written(turn.completion)))
        self._streamed = False
        for number, observation in enumerate(turn.observations):
            call = turn.calls[number] if number < len(turn.calls) else None
            if call is not None and call.name == "plan" and observation.ok:
                self._plan(call)
            else:
                self._observation(observation)

    def _say_slow(self, turn: Turn, speed: float | None) -> None:
        """Say once that an answer as long as it may be does not fit into the run's time."""
        most = turn.completion.sampling.max_tokens
        if speed and most / speed > self._seconds:
            minutes = most / speed / 60
            self._progress.print(
                f"{most:,} tokens, the most of an answer, take {minutes:.0f} minutes at {speed:.3g}/s; the"
                f" run has {self._seconds / 60:.3g}: --limit max_completion_tokens=N lowers it",
                style="yellow",
            )
            self._seconds = math.inf

    def _plan(self, call: ToolCall) -> None:
        steps = call.arguments.get("steps")
        for step in steps if isinstance(steps, list) else ():
            if isinstance(step, dict):
                sign, style = _SIGNS.get(str(step.get("status")), _SIGNS["pending"])
                self._progress.print(Text(f"  {sign}", style), printable(str(step.get("step"))))

    def _client(self, message: Message) -> None:
        text = message.content if self._verbose else message.content[:_SHOWN]
        for line in printable(text, None).splitlines() or [""]:
            self._progress.print(Text("│", "blue"), Text(f"{message.role.value} ", "blue"), line)
        if len(text) < len(message.content):
            self._progress.print(Text("│", "blue"), f"({len(message.content):,} characters; -v shows them)")

    def tried(self, count: int, member: int, trajectory: Trajectory) -> None:
        """The end of one of several tries."""
        turns = len(trajectory.turns)
        self._progress.print(
            f"try {member + 1} of {count}: {_how_it_ended(trajectory)} ({turns} turn{'s'[: turns != 1]})"
        )

    def escalated(self, trajectory: Trajectory) -> None:
        """The end of the hosted model's run after the local ones."""
        cost = cost_of(trajectory)
        price = "at a price that is not known" if cost is None else f"for ${cost:.4f}"
        self._progress.print(
            f"\n{printable(trajectory.policy)}: {_how_it_ended(trajectory)}, {price} (run {trajectory.id})"
        )

    def _grading(self, trajectory: Trajectory) -> None:
        if trajectory.task.check and trajectory.stop and not trajectory.stop.ours:
            self._progress.print(f"\nchecking in a fresh sandbox: {printable(trajectory.task.check)}")

    def end(self, trajectory: Trajectory, *, applied: bool) -> None:
        if not (on_terminal() and trajectory.diff):
            self.diff(trajectory)
        self._result.print(f"\nstopped: {trajectory.stop}{_detail(trajectory)}")
        if trajectory.answer is not None:
            self._result.print(f"answer: {printable(trajectory.answer)}")
        self._result.print(f"check: {printable(outcome(trajectory))}")
        self._check_output(trajectory)
        if spent := spending(trajectory):
            cost = "" if spent["cost"] is None else f", ${spent['cost']:.4f}"
            read = f"{spent['prompt']} tokens read ({spent['cached']} cached)"
            self._result.print(f"usage: {read}, {spent['completion']} written{cost}")
        self._result.print(f"run: {trajectory.id}")
        if trajectory.stop in (StopReason.INTERRUPTED, StopReason.POLICY_ERROR):
            self._result.print(f"nano-coder resume {trajectory.id}{printable(self._again)} goes on with it")
        if trajectory.diff and not applied:
            self._result.print(f"not applied; nano-coder apply {trajectory.id} does it", style="dim")

    def whole(self, trajectory: Trajectory) -> None:
        """A logged run from its task to its end."""
        self.start(trajectory)
        print(printable(trajectory.task.prompt), flush=True)
        for turn in trajectory.turns:
            self.turn(turn)
        self.end(trajectory, applied=True)

    def answered(self, trajectory: Trajectory) -> None:
        """What a message of a conversation came to."""
        if trajectory.stop is not StopReason.FINISHED:
            self._result.print(f"stopped: {trajectory.stop}{_detail(trajectory)}")
        if trajectory.answer is not None:
            self._result.print(printable(trajectory.answer))
        if trajectory.verdict is not None:
            self._result.print(f"check: {printable(outcome(trajectory))}")
            self._check_output(trajectory)
        changed = sum(line.startswith("+++ ") for line in trajectory.diff.splitlines())
        self._result.print(f"run {trajectory.id}; files that differ from the start: {changed}", style="dim")

    def _observation(self, observation: Observation) -> None:
        colour = "green" if observation.ok else "yellow"
        for line in self._folded(observation.text, self._progress):
            self._progress.print(Text("│", colour), line)
        if observation.timed_out and "tool_seconds" not in observation.text:
            self._progress.print(Text("│", colour), f"(cut off; {_MORE} tool_seconds=N)")

    def _check_output(self, trajectory: Trajectory) -> None:
        ran = trajectory.verdict.check_run if trajectory.verdict else None
        if ran and trajectory.reward != 1:
            for line in self._folded(ran.output, self._result):
                self._result.print(Text("│", "yellow"), line)

    def _folded(self, text: str, console: Console) -> list[str]:
        """Lines as they are shown: head and tail of many on a terminal."""
        lines = printable(text, None).splitlines()
        if self._verbose or not console.is_terminal:
            return lines
        lines = [line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + "..." for line in lines]
        if len(lines) <= _FOLDED:
            return lines
        head, tail = _FOLDED // 2, _FOLDED - _FOLDED // 2 - 1
        return [*lines[:head], f"... {len(lines) - head - tail} more lines; -v shows them", *lines[-tail:]]

    def diff(self, trajectory: Trajectory) -> None:
        if trajectory.diff and not self._result.is_terminal:
            self._result.print(printable(trajectory.diff, None), end="")
        elif trajectory.diff:
            from rich.syntax import Syntax  # and its lexers

            self._result.print(Syntax(printable(trajectory.diff, None), "diff", background_color="default"))
        else:
            self._result.print("no changes")


_MEASURED = 50
"""tokens of an answer from which a speed is told"""


def _speed(turn: Turn) -> float | None:
    """Sampled tokens a second, the reading of the prompt included; None for a short answer."""
    tokens = turn.completion.tokens
    seconds = turn.ended - turn.started - sum(seen.ended - seen.started for seen in turn.observations)
    if tokens is None or len(tokens.sampled_ids) < _MEASURED or seconds <= 0:
        return None
    return len(tokens.sampled_ids) / seconds


def written(completion: Completion) -> str:
    """A completion as a person reads it: its text, and the calls that an API returned beside it."""
    calls = completion.api.calls if completion.api else ()
    return "\n".join([*filter(None, [completion.text]), *(f"{call.name} {call.arguments}" for call in calls)])


def spending(trajectory: Trajectory) -> dict[str, Any] | None:
    """Tokens and dollars of a run's own turns; None for a policy that is no API."""
    usages = [turn.completion.api.usage for turn in trajectory.own_turns if turn.completion.api]
    if not usages:
        return None
    total: dict[str, Any] = {
        name: sum(getattr(usage, name) for usage in usages)
        for name in ("prompt", "cached", "completion", "reasoning")
    }
    costs = [usage.cost for usage in usages if usage.cost is not None]
    return total | {"cost": sum(costs) if len(costs) == len(usages) else None}


def cost_of(trajectory: Trajectory) -> float | None:
    """Dollars of a run's own turns; None where a price is not known."""
    spent = spending(trajectory)
    return spent["cost"] if spent else 0.0


_MORE = "more with --limit"
_ALLOWED = {
    StopReason.MAX_TURNS: ("max_turns", "max_turns"),
    StopReason.MAX_SECONDS: ("max_seconds", "max_seconds"),
    StopReason.MAX_TOKENS: ("max_tokens", "max_run_tokens"),
    StopReason.MAX_COST: ("max_cost", "max_cost"),
}
"""stop reason -> the limit of a task, and the setting of it"""
_FAILURES = {
    "check_not_found": " (its command could not be run)",
    "agent_timeout": " (it ran out of time)",
}


def outcome(trajectory: Trajectory) -> str:
    verdict = trajectory.verdict
    if verdict is None:
        return "none was given"
    ran = verdict.check_run
    if verdict.grader == GRADER:
        parts = ", ".join(f"{name} {value:g}" for name, value in verdict.components.items())
        return f"none was run; the session's client or feedback gave the reward {verdict.reward:g} ({parts})"
    if verdict.reward is None and ran is not None and ran.not_run is not None:
        return f"could not be run: {ran.not_run}; --python names an interpreter that has what it needs"
    if verdict.reward is None:
        return f"not graded ({verdict.failure_kind})"
    how = _FAILURES.get(str(verdict.failure_kind), "")
    if not how and ran is not None:
        how = f" (exit code {ran.exit_code})" if ran.signal is None else f" (ended by signal {ran.signal})"
    passed = "passed" if verdict.reward >= 1 else f"failed{how}"
    tampered = "; tampering: " + "; ".join(t.detail for t in verdict.tampering) if verdict.tampering else ""
    return f"{passed}{_resting_on(verdict, trajectory.task)}{tampered}"


def _resting_on(verdict: Verdict, task: Task) -> str:
    if not task.check_trusted:
        return ", by a check of this project's nano.toml, which you do not trust, so nothing trains on it"
    if verdict.trust is Trust.USER_CHECK:
        return " on the original tests plus the diff"
    if verdict.trust is Trust.NONE and verdict.check_run is not None:
        changed = ", ".join(verdict.check_run.changed)
        return f", but rests on a changed script that it runs itself ({changed}), so nothing trains on it"
    return ""


def _how_it_ended(trajectory: Trajectory) -> str:
    """The end of a run in few words, of several that are told together."""
    if trajectory.reward is not None:
        return "passed" if trajectory.reward >= 1 else "failed"
    if trajectory.stop and trajectory.stop.ours:
        return f"{trajectory.stop}{_detail(trajectory)}"
    return printable(outcome(trajectory)) if trajectory.verdict else "its check was ended"


def exit_code(trajectory: Trajectory) -> int:
    """The design's table: 0 done, 1 not, 4 backend, 5 budget, 6 sandbox, 130 interrupted."""
    match trajectory.stop:
        case StopReason.POLICY_ERROR:
            return 4
        case StopReason.SANDBOX_ERROR:
            return 6
        case StopReason.INTERRUPTED:
            return 130
    if trajectory.verdict is not None:
        done = trajectory.verdict.reward is not None and trajectory.verdict.reward >= 1
    else:
        done = trajectory.stop is StopReason.FINISHED
    if done:
        return 0
    return 5 if trajectory.stop and trajectory.stop.budget else 1


def summary(trajectory: Trajectory, *, applied: bool) -> dict[str, Any]:
    """The result of a run as `--json` prints it."""
    return {
        "run": trajectory.id,
        **{name: getattr(trajectory, name) for name in ("stop", "stop_detail", "answer")},
        "turns": len(trajectory.turns), "sampled_tokens": trajectory.num_sampled_tokens,
        "diff": trajectory.diff,
        "verdict": trajectory.verdict.model_dump(mode="json") if trajectory.verdict else None,
        "usage": spending(trajectory), "applied": applied, "exit_code": exit_code(trajectory),
    }  # fmt: skip


def _detail(trajectory: Trajectory) -> str:
    if trajectory.stop in _ALLOWED:
        limit, setting = _ALLOWED[trajectory.stop]
        return f" (at {getattr(trajectory.task.limits, limit):g}; {_MORE} {setting}=N)"
    return f" ({printable(trajectory.stop_detail)})" if trajectory.stop_detail else ""
