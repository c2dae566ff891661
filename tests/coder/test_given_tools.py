"""Runs that were given further tools: how they are logged, and what goes on from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, prompt_proof

from nano_coder.agent.profiles import COMPACT_1, with_tools
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunHooks, Runtime, resume_run, run_task
from nano_coder.run.fork import fork_run
from nano_coder.tools.tool import TOOLS
from nano_coder.verify.trainable import RefusalCode, verify
from nano_shared.errors import UsageError
from nano_shared.types import Trajectory, Turn

SOURCE = """
from nano_coder.tools.tool import ToolContext, tool

@tool({options})
def compass(context: ToolContext, place: str{more}) -> str:
    'Say where a place lies.'
    context.jail.write("seen.txt", place.encode())
    return "north of " + place
"""
LOOK = "@compass place=Bonn"


@pytest.fixture(autouse=True)
def nothing_given() -> Iterator[None]:
    """Each test is a process of its own, as far as tools of files go."""
    before = dict(TOOLS._given)
    yield
    TOOLS._given.clear()
    TOOLS._given.update(before)


def give(folder: Path, *, options: str = "mutates=True", more: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(SOURCE.format(options=options, more=more))
    TOOLS._given.clear()
    TOOLS.give(f"{folder}/mine.py:compass")


def interrupted(tmp_path: Path) -> tuple[Trajectory, Runtime]:
    """A run that was given a tool, called it and was cut; the runtime is of its bare profile."""
    give(tmp_path)
    runtime = a_runtime(tmp_path, [LOOK, SUBMIT], profile=COMPACT_1)

    def interrupt(_: Turn) -> None:
        raise KeyboardInterrupt

    given = replace(runtime, profile=with_tools(COMPACT_1, ["compass"]))
    return run_task(a_task(), replace(given, hooks=RunHooks(turn=interrupt))), runtime


def test_the_tool_is_called_and_logged_under_a_profile_of_its_own(tmp_path: Path) -> None:
    run, runtime = interrupted(tmp_path)
    (seen,) = run.turns[0].observations
    assert (seen.ok, seen.text, seen.files_changed) == (True, "north of Bonn", ("seen.txt",))
    assert run.profile == "compact-1+compass"
    assert run.tools_hash != COMPACT_1.tools_hash
    assert runtime.store.get(run.id) == run


def test_it_is_resumed_and_forked_with_the_tool(tmp_path: Path) -> None:
    run, runtime = interrupted(tmp_path)
    whole = resume_run(run.id, runtime)
    assert (str(whole.stop), whole.profile) == ("finished", "compact-1+compass")
    again = replace(runtime, policy=ScriptedPolicy([SUBMIT], tokens=True))
    (fork,) = fork_run(whole, again, at=1, n=1)
    assert fork.profile == "compact-1+compass"
    assert prompt_proof(whole, runtime).differing is None


def test_without_the_tool_nothing_goes_on_and_the_sentence_names_it(tmp_path: Path) -> None:
    run, runtime = interrupted(tmp_path)
    codes = {finding.kind for finding in verify(run)}
    assert RefusalCode.OTHER_PROFILE not in codes
    TOOLS._given.clear()
    # the log has the tool as the model saw it, so its text can be checked without it
    assert RefusalCode.OTHER_PROFILE not in {finding.kind for finding in verify(run)}
    assert prompt_proof(run, runtime).differing is None
    older = run.model_copy(update={"given_tools": ()})
    assert "was given the tool 'compass'" in " ".join(finding.text for finding in verify(older))
    said = f"run {run.id} was given the tool 'compass', which is not at hand: .* --tool FILE.py:NAME"
    with pytest.raises(UsageError, match=said):
        resume_run(run.id, runtime)
    with pytest.raises(UsageError, match=said):
        fork_run(run, runtime, at=1, n=1)
    assert runtime.store.get(run.id) == run


def test_another_tool_of_the_name_is_not_the_same_tool(tmp_path: Path) -> None:
    run, runtime = interrupted(tmp_path)
    give(tmp_path / "other", more=", height: int = 0")
    with pytest.raises(UsageError, match="was made with other tools than profile"):
        resume_run(run.id, runtime)
