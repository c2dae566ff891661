"""Builders for tests that execute: a runtime on a log of its own, and actions in the compact dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1, logged_profile
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunSettings, Runtime
from nano_coder.sandbox.protocol import ExecResult, open_sandbox
from nano_coder.verify.tokens import PromptProof, PromptRenderer, prove_prompts
from nano_shared.policy import InterfaceProfile
from nano_shared.store import LogStore
from nano_shared.types import Limits, Task, ToolCall, Trajectory


def act(tool: str, profile: InterfaceProfile = COMPACT_1, /, **arguments: Any) -> str:
    """One action as a model writes it."""
    call = ToolCall(name=tool, arguments=arguments)
    return DIALECTS[profile.dialect].render("", (call,), profile.tools)


SUBMIT = act("submit")


def a_task(**changes: Any) -> Task:
    return Task(**{"key": "t", "prompt": "fix it", "files": {"a.py": "one\ntwo\n"}} | changes)


def limits(**changes: Any) -> Limits:
    return Limits(**{"memory_mb": 256, "max_tokens": 100_000} | changes)


def prompt_proof(run: Trajectory, runtime: Runtime, renderer: PromptRenderer | None = None) -> PromptProof:
    """The prompts of a logged run, rendered again; those of a scripted run without a renderer."""
    profile = logged_profile(run)
    assert profile is not None
    return prove_prompts(run, profile, renderer or ScriptedPolicy([]), runtime.store.blobs)


def stopped_after_output(run: Callable[[float], ExecResult]) -> ExecResult:
    """`run(seconds)` under the first time limit that lets it write: on a busy machine that takes its time."""
    for seconds in (0.5, 5.0, 50.0):
        result = run(seconds)
        if result.stdout:
            break
    return result


def a_runtime(folder: Path, texts: Iterable[str] = (), *, tokens: bool = True, **changes: Any) -> Runtime:
    """A runtime with a script for a policy; `folder` holds its log."""
    policy = ScriptedPolicy(texts, tokens=tokens, context_limit=changes.pop("context_limit", 1_000_000))
    settings = RunSettings(hosts=changes.pop("hosts", frozenset()))
    changes.setdefault("settings", settings)
    fields = {"policy": policy, "sandbox": open_sandbox(), "store": LogStore.open(folder / "log.db")}
    return Runtime(**fields | changes)
