"""Actions: executes an agent's calls on its workspace, and makes of their outputs what the model sees."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nano_coder.sandbox.protocol import ExecResult, Jail
from nano_coder.tools.tool import TOOLS, RecordedAnswers, ToolContext, ToolFailure, ToolResult
from nano_shared import snapshot, snapshot_change
from nano_shared.errors import UsageError
from nano_shared.policy import InterfaceProfile, ObservationFormat
from nano_shared.printable import terminal_text
from nano_shared.snapshot import MAX_BYTES, BlobStore, Quota, SnapshotError, shown
from nano_shared.types import Limits, Observation, ToolCall, Trajectory

if TYPE_CHECKING:
    from nano_coder.environment import OpenSession


WORKSPACE_LOST = "the workspace that it left cannot be kept"
"""detail of the end of such a run"""


def workspace_after(trajectory: Trajectory, step: int | None) -> str:
    """Snapshot after a step: 1 is the first turn, 0 the start, None the last logged turn. Raises UsageError
    for a step that the run does not have, and for a run without a workspace."""
    run, count = trajectory.id, len(trajectory.turns)
    if trajectory.snapshot is None:
        raise UsageError(f"run {run} never got a workspace: there is nothing that it changed")
    if step is not None and not 0 <= step <= count:
        steps = f"steps 1 to {count}, and 0 for the start" if count else "no steps, only 0 for the start"
        raise UsageError(f"run {run} has no step {step}: it has {steps}")
    turns = trajectory.turns[:step]
    return next((turn.snapshot for turn in reversed(turns) if turn.snapshot), trajectory.snapshot)


def workspaces_since(trajectory: Trajectory, step: int) -> list[str]:
    """Snapshots after the turns that follow a step, newest first, without repetitions."""
    found = (turn.snapshot for turn in reversed(trajectory.turns[step:]) if turn.snapshot)
    return list(dict.fromkeys(found))


class Workspace:
    """The workspace of one jail. `start` is the snapshot before the first action, `snapshot` the newest."""

    def __init__(
        self, jail: Jail, blobs: BlobStore, *, start: str, snapshot: str, most_mb: int | None = None
    ) -> None:
        """`most_mb`: largest size, MB; None is the default of snapshots."""
        self._jail = jail
        self._blobs = blobs
        self.start = start
        self.snapshot = snapshot
        self.lost = False
        """True if no snapshot can be taken of the workspace after the last change"""
        self.left_out: tuple[str, ...] = ()
        """paths that the newest snapshot leaves out: pipes, sockets, devices, and what cannot be read"""
        self._most = MAX_BYTES if most_mb is None else most_mb << 20
        self._quota = Quota(2 * self._most)

    def refresh(self) -> tuple[str, ...]:
        """Take a snapshot and return the files that changed since the last one. Raises SnapshotError if the
        workspace is too large or unreadable, which the agent can repair."""
        self.lost = True
        before = snapshot.load(self.snapshot, self._blobs)
        left_out: list[str] = []
        self.snapshot = snapshot.snapshot_tar(
            self._jail.snapshot(), self._blobs, max_bytes=self._most, quota=self._quota, before=before,
            left_out=left_out.append,
        )  # fmt: skip
        self.left_out = tuple(map(shown, left_out))
        self.lost = False
        return tuple(map(shown, snapshot.changed_paths(before, snapshot.load(self.snapshot, self._blobs))))

    def files(self) -> list[str]:
        """Paths of the regular files in the starting snapshot."""
        return snapshot.load(self.start, self._blobs).shown_files

    def diff(self) -> str:
        if self.start == self.snapshot:
            return ""
        return snapshot_change.diff(
            snapshot.load(self.start, self._blobs), snapshot.load(self.snapshot, self._blobs), self._blobs
        )


BLIND = "this model sees no images"
_OF_A_RUN = ("exit_code", "signal", "timed_out", "denials")
_SHOWN = 5
"""paths that a note names"""
_NO_NOTES = ("compact",)
"""dialects whose frozen observations do not mention limits"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """What the agents of a run act in, sub-agents included."""

    context: ToolContext
    workspace: Workspace
    profile: InterfaceProfile
    count: Callable[[str], int]
    """number of tokens of a text"""
    put_blob: Callable[[bytes], str]
    put_image: Callable[[bytes], str] | None = None
    """stores the bytes as they are; None: the policy does not see"""
    session: OpenSession | None = None
    """of the environment that the task is of; None for a task of ours"""
    record: RecordedAnswers | None = None
    """recorded answers of a logged run, used instead of calling recorded tools"""

    @property
    def notes(self) -> bool:
        """Whether observations mention limits."""
        return self.profile.dialect not in _NO_NOTES

    def execute(
        self, turn: int, number: int, call: ToolCall, offered: Sequence[str]
    ) -> tuple[Observation, tuple[str, ...]]:
        """Execute one call of a turn. Returns what it came to, and the names of the tool's repairs."""
        started = time.time()
        recorded = self.record.take(call) if self.record else None
        try:
            result = recorded or self._tool(turn, call, offered)
        except ToolFailure as failure:
            result = ToolResult(text=f"error: {failure}", ok=False)
        repairs = tuple(f"{call.name}: {name}" for name in result.repairs)
        changed: tuple[str, ...] = ()
        if not recorded and call.name in offered and call.name in TOOLS and TOOLS[call.name].mutates:
            result, changed = self._kept(result)
        return self.observed(call.name, turn, number, result, started, changed), repairs

    def _tool(self, turn: int, call: ToolCall, offered: Sequence[str]) -> ToolResult:
        if call.name not in offered:
            raise ToolFailure(f"unknown tool {call.name}; the tools are {', '.join(offered)}")
        if self.session is not None and self.session.offers(call.name):
            return self.session.step(call)
        result = TOOLS.find(call.name)(replace(self.context, turn=turn), dict(call.arguments))
        if result.images and self.put_image is None:
            raise ToolFailure(f"{call.name} answered with an image, and {BLIND}; work from the text of files")
        return result

    def _kept(self, result: ToolResult) -> tuple[ToolResult, tuple[str, ...]]:
        """Keep the workspace after a call. Returns its result, with what could not be kept, and the changed
        files."""
        known = self.workspace.left_out
        try:
            changed = self.workspace.refresh()
        except SnapshotError as problem:  # the workspace outgrew its limits, which the agent can mend
            return replace(result, text=f"error: {problem}\n{result.text}", ok=False), ()
        new = [repr(path) for path in self.workspace.left_out if path not in known]
        if new and self.notes:
            named = ", ".join(new[:_SHOWN]) + (f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else "")
            note = f"[in no diff, since it is no file, folder or link, or cannot be read: {named}]"
            result = replace(result, text=f"{result.text}\n{note}")
        return result, changed

    def observed(
        self, name: str, turn: int, number: int, result: ToolResult, started: float,
        changed: tuple[str, ...] = (),
    ) -> Observation:  # fmt: skip
        """The observation of a result: truncated, with the whole text stored."""
        images = tuple(image for image, data in result.images if self.put_image and self.put_image(data))
        # a call can quote half a surrogate pair, which no tokenizer accepts
        full = result.text.encode("utf-8", "backslashreplace")
        spill, whole = spill_path(turn, number), full.decode()
        text, cut = shorten(whole, self.count, self.profile.observation, full_output=spill, tool=name)
        blob = None
        if text != whole:
            blob = self.put_blob(full)
            with contextlib.suppress(OSError):  # the agent may have put something else at that path
                self.context.jail.write(spill, full)
        run = result.execution
        if run and self.notes:
            text += limits_met(run, self.context.limits)
        ran = {name: getattr(run, name) for name in _OF_A_RUN} if run else {}
        return Observation(
            tool=name, ok=result.ok, text=text, blob=blob, files_changed=changed,
            bytes_total=run.stdout_bytes + run.stderr_bytes if run else len(full),
            truncated=cut or (run.truncated if run else False), started=started, ended=time.time(),
            images=images, **ran,
        )  # fmt: skip


def spill_path(turn: int, call: int) -> str:
    """Path at which the agent finds the whole output of a truncated observation; snapshots leave it out."""
    return f".nano/output_{turn}{f'_{call}' if call else ''}.txt"


_NO_PROCESS = (b"Resource temporarily unavailable", b"can't start new thread", b"Cannot fork")
_NO_SPACE = (b"No space left on device",)
_KILLED = 128 + 9
"""exit code of a shell whose last program got SIGKILL, as the kernel sends it beyond a group's limit"""


def limits_met(run: ExecResult, limits: Limits) -> str:
    """A sentence for each limit that cut a program, with the setting that raises it; empty for none."""
    said = (run.stdout[-4096:] + run.stderr[-4096:]) if not run.ok else b""
    met = [
        (run.timed_out, f"it was ended after {limits.tool_seconds:g} s (setting tool_seconds)"),
        (run.oom, f"its memory ended at {limits.memory_mb} MB (setting tool_memory_mb)"),
        (
            run.exit_code == _KILLED and not run.oom,
            f"what was killed may have met the limit of {limits.memory_mb} MB (setting tool_memory_mb)",
        ),
        (
            run.truncated,
            f"of each output the first and last part are kept, {limits.output_bytes} bytes in all (setting"
            " tool_output_bytes)",
        ),
        (
            any(text in said for text in _NO_PROCESS),
            "it may have met the limit of processes and threads (setting tool_processes)",
        ),
        (
            any(text in said for text in _NO_SPACE),
            "it may have met the limit of a workspace's size (setting workspace_mb)",
        ),
    ]
    return "".join(f"\n[{sentence}]" for holds, sentence in met if holds)


_AS_THEY_ARE = frozenset(("read_file", "read", "grep", "search"))
"""tools that show lines of files, which an edit has to repeat"""


def shorten(
    text: str, count: Callable[[str], int], form: ObservationFormat, *, full_output: str, tool: str = ""
) -> tuple[str, bool]:
    """The text for the model, and whether it was cut. `full_output` is the path of the whole output. It is
    what a terminal would show, but for the tools that show lines of files. The head has at most `head_tokens`
    and the tail at most `tail_tokens`, as counted by the policy."""
    if tool not in _AS_THEY_ARE:
        text = terminal_text(text)
    limit = form.head_tokens + form.tail_tokens
    # a token has at least one character, so a short text needs no counting
    if len(text) <= limit or count(text) <= limit:
        return text, False
    marker = f"[cut: first and last part of {len(text)} characters; all of it in {full_output}]"
    return f"{marker}\n{_ends(text, form.head_tokens, form.tail_tokens, count)}", True


def cut_to(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """The first and last part of a text of more than `tokens` tokens, which are about so many."""
    if count(text) <= tokens:
        return text
    ends = _ends(text, tokens // 2, tokens // 2, count)
    return f"[cut: first and last part of {len(text)} characters]\n{ends}"


def _ends(text: str, head_tokens: int, tail_tokens: int, count: Callable[[str], int]) -> str:
    head = text[: _fitting(text, head_tokens, count, from_end=False)]
    tail = text[len(text) - _fitting(text, tail_tokens, count, from_end=True) :]
    return f"{head}\n[...]\n{tail}"


def _fitting(text: str, tokens: int, count: Callable[[str], int], *, from_end: bool) -> int:
    """How many characters from one end fit into `tokens`; by bisection."""
    low, high = 0, min(len(text), tokens * 16)
    while low < high:
        middle = (low + high + 1) // 2
        piece = text[len(text) - middle :] if from_end else text[:middle]
        if count(piece) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low
