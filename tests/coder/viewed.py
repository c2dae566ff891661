"""Logs for the tests of the viewer, and runs that are an attack on whoever shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Observation,
    Sampling,
    StopReason,
    Tampering,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Verdict,
)

HOSTILE = (
    "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">"
    "</pre></script><!-- ]]> & {{ 7*7 }} \u202etxt.exe\x00\x1b[31m \ud800 \U000e0041 ünïcode 漢字"
)
LINE = "A long line <b>without</b> end. " * 160_000
"""5 MB"""


def seen(text: str = "done", **changed: Any) -> Observation:
    values = {"tool": "shell", "ok": True, "text": text, "exit_code": 0, "started": 1.0, "ended": 1.5}
    return Observation.model_validate({**values, **changed})


def turn(
    index: int = 0,
    sampled: Sequence[int] = (5, 6, 7),
    *,
    context: Sequence[int] = (1, 2),
    text: str = "@shell\nls",
    version: int = 0,
    text_only: bool = False,
    observation: Observation | None = None,
) -> Turn:
    tokens = TurnTokens(
        context_ids=tuple(context), sampled_ids=tuple(sampled),
        logprobs=tuple(-0.5 * (n % 7) for n in range(len(sampled))),
    )  # fmt: skip
    completion = Completion(
        text=text, finish=Finish.STOP, tokens=None if text_only else tokens, sampling=Sampling(),
        policy_id="weights", policy_version=version,
    )  # fmt: skip
    return Turn(
        index=index, completion=completion, calls=(ToolCall(name="shell", arguments={"command": "ls"}),),
        observations=(observation or seen(),), parser="compact", started=0.0, ended=1.0,
    )  # fmt: skip


def run(
    name: str,
    *turns: Turn,
    key: str = "task-0",
    reward: float | None = 1.0,
    at: float = 0.0,
    prompt: str = "Do it.",
    policy: str = "tiny",
    **changed: Any,
) -> Trajectory:
    verdict = Verdict(reward=reward, trust=Trust.HIDDEN, grader="test", graded_hash="g")
    made = Trajectory(
        id=name, task=Task(key=key, prompt=prompt), turns=turns or (turn(),), stop=StopReason.FINISHED,
        runtime_version="0", profile="compact-1", profile_hash="p", template_hash="t", tools_hash="h",
        policy=policy, started=at, ended=at + 2.0, verdict=verdict,
    )  # fmt: skip
    return made.model_copy(update=changed)


def hostile(name: str, at: float = 0.0, reward: float = 0.0, sampled: Sequence[int] = (9, 9)) -> Trajectory:
    """A run in which everything that a model, a program or a task can write is an attack on the page."""
    observation = seen(HOSTILE, tool=HOSTILE, ok=False, exit_code=1, files_changed=(HOSTILE,))
    made = turn(sampled=sampled, text=HOSTILE, observation=observation)
    made = made.model_copy(
        update={"calls": (ToolCall(name=HOSTILE, arguments={HOSTILE: HOSTILE}),), "parse_error": HOSTILE}
    )
    base = run(name, made, key=HOSTILE, prompt=HOSTILE, policy=HOSTILE, at=at, reward=reward)
    task = base.task.model_copy(
        update={"files": {HOSTILE.replace("\0", "") + ".py": HOSTILE}, "family": HOSTILE}
    )
    verdict = Verdict(
        reward=reward, trust=Trust.HIDDEN, grader="test", graded_hash="g", checks={HOSTILE: "fail"},
        components={HOSTILE: 0.5}, failure_kind=HOSTILE, tampering=(Tampering(kind="exit", detail=HOSTILE),),
    )  # fmt: skip
    texts = dict.fromkeys(("answer", "diff", "stop_detail", "directory"), HOSTILE)
    return base.model_copy(update={"task": task, "verdict": verdict, **texts})


def log_of(path: Path, runs: Sequence[Trajectory]) -> LogStore:
    store = LogStore.open(path)
    for each in runs:
        store.append(each)
    return store
