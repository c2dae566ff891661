"""The loop: turns, the reasons to stop, what the agent sees, and what is recorded of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits

from nano_coder.agent.loop import turn_seed
from nano_coder.agent.profiles import COMPACT_1, HERMES_1, find_profile
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, run_task
from nano_shared import extension_points
from nano_shared.types import Finish, StopReason, Task, Trajectory


def run(
    folder: Path, texts: list[str], task: Task | None = None, **changes: Any
) -> tuple[Trajectory, Runtime]:
    runtime = a_runtime(folder, texts, **changes)
    return run_task(task or a_task(), runtime), runtime


def seen(trajectory: Trajectory) -> list[str]:
    return [observation.text for turn in trajectory.turns for observation in turn.observations]


def test_it_acts_observes_and_submits(tmp_path: Path) -> None:
    trajectory, runtime = run(
        tmp_path, [act("edit_file", path="a.py", line=2, new="2"), act("submit", answer="done")]
    )
    assert (trajectory.stop, trajectory.answer) == (StopReason.FINISHED, "done")
    assert seen(trajectory) == ["edited a.py", "submitted"]
    assert trajectory.turns[0].observations[0].files_changed == ("a.py",)
    assert trajectory.diff.endswith("@@ -1,2 +1,2 @@\n one\n-two\n+2\n")
    snapshots = [trajectory.snapshot, *(turn.snapshot for turn in trajectory.turns)]
    assert snapshots[0] != snapshots[1] == snapshots[2]
    assert runtime.store.get(trajectory.id) == trajectory


def test_the_conversation_is_the_concatenation_of_the_turns_tokens(tmp_path: Path) -> None:
    texts = [act("shell", command="echo é"), "no action", SUBMIT]
    trajectory, _ = run(tmp_path, texts)
    tokens = [turn.completion.tokens for turn in trajectory.turns]
    row = [i for t in tokens if t for ids in (t.context_ids, t.sampled_ids) for i in ids]
    text = bytes(i for i in row if i < 256).decode()
    assert text.startswith("system: You are a coding agent.")
    system, _, rest = text.partition("user: ")
    assert system
    refused = trajectory.turns[1].observations[0].text
    assert rest == (
        f"fix it\nFiles: a.py\n{texts[0]}tool: é\n{texts[1]}tool: {refused}\n{texts[2]}"
    )  # fmt: skip
    assert [turn.completion.text for turn in trajectory.turns] == texts


@pytest.mark.parametrize(
    ("texts", "changes", "stop"),
    [
        (["@search pattern=x"] * 2 + ["@search pattern=y"], {"max_turns": 2}, StopReason.MAX_TURNS),
        (["@search pattern=" + "x" * 60, "@search pattern=y"], {"max_tokens": 50}, StopReason.MAX_TOKENS),
        (["@search pattern=x", "@search pattern=y"], {"max_seconds": 1e-6}, StopReason.MAX_SECONDS),
        (["hm", "well", "so"], {}, StopReason.FORMAT_ERRORS),
        (["@calculate\n1"] * 4, {}, StopReason.LOOP),
        (["@calculate\n1", "hm"] * 4, {}, StopReason.LOOP),
        (["@calculate\n1", "@calculate\n2", "@search pattern=x"] * 4, {}, StopReason.LOOP),
        (["@calculate\n1"], {}, StopReason.POLICY_ERROR),
    ],
)
def test_it_stops_for_a_reason(
    tmp_path: Path, texts: list[str], changes: dict[str, Any], stop: StopReason
) -> None:
    trajectory, runtime = run(tmp_path, texts, a_task(limits=limits(**changes)))
    assert trajectory.stop is stop
    assert runtime.store.get(trajectory.id) == trajectory


def test_a_good_turn_between_errors_starts_the_count_anew(tmp_path: Path) -> None:
    trajectory, _ = run(tmp_path, ["hm", "so", "@calculate\n1", "hm", "so", SUBMIT])
    assert trajectory.stop is StopReason.FINISHED


def test_ac_30_a_full_context_ends_the_run_and_says_so(tmp_path: Path) -> None:
    trajectory, _ = run(tmp_path, [act("shell", command="yes | head -400")] * 2, context_limit=700)
    assert trajectory.stop is StopReason.CONTEXT_FULL
    assert "700" in str(trajectory.stop_detail)
    assert len(trajectory.turns) == 1


def test_a_task_restricts_the_tools(tmp_path: Path) -> None:
    texts = [act("shell", command="echo hi"), act("calculate", expression="1+1"), SUBMIT]
    trajectory, _ = run(tmp_path, texts, a_task(tools=("calculate", "submit")))
    assert seen(trajectory)[:2] == ["error: unknown tool shell; the tools are calculate, submit", "2"]
    tokens = trajectory.turns[0].completion.tokens
    assert tokens
    first = bytes(tokens.context_ids).decode()
    assert "@calculate" in first
    assert "@shell" not in first


def test_a_call_of_an_installed_tool_that_is_broken_and_not_offered_is_an_unknown_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site/teapot-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: teapot\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[nano.tools]\npour = no_such_module:pour\n")
    monkeypatch.syspath_prepend(info.parent)
    extension_points._entry_points.cache_clear()
    extension_points._registered.cache_clear()
    try:
        trajectory, _ = run(tmp_path / "run", ["@pour", SUBMIT])
    finally:
        monkeypatch.undo()
        extension_points._entry_points.cache_clear()
        extension_points._registered.cache_clear()
    assert trajectory.stop is StopReason.FINISHED
    assert seen(trajectory)[0].startswith("error: unknown tool pour; the tools are read_file, ")


def test_a_failed_action_is_an_observation(tmp_path: Path) -> None:
    texts = ["@nothing", "@read_file path=b.py", "@read_file", "@read_file path=", SUBMIT]
    trajectory, _ = run(tmp_path, texts)
    assert seen(trajectory)[:3] == [
        "error: unknown tool nothing; the tools are read_file, edit_file, write_file, search, shell, python, "
        "calculate, submit",
        "error: no such file: b.py",
        "error: path is missing. Usage: read_file(path, start?, end?)",
    ]
    assert trajectory.turns[3].parse_error
    assert not any(o.ok for turn in trajectory.turns[:4] for o in turn.observations)
    assert trajectory.stop is StopReason.FINISHED


@pytest.mark.parametrize("bad", ["\0", "\ud800", "\x1b[2J"])
def test_no_text_of_a_model_ends_a_run(tmp_path: Path, bad: str) -> None:
    """JSON can spell what no path, no argument and no tokenizer takes."""
    calls = [
        act("shell", HERMES_1, command=f"echo {bad}"), act("read_file", HERMES_1, path=bad),
        act("write_file", HERMES_1, path=f"x{bad}", content=bad), act(f"tool{bad}", HERMES_1, **{bad: bad}),
        act("search", HERMES_1, pattern=bad, path=bad), act("python", HERMES_1, code=bad),
        act("edit_file", HERMES_1, path="a.py", old=bad, new=bad), act("submit", HERMES_1),
    ]  # fmt: skip
    # as a model writes it: what json.dumps leaves raw, escaped
    texts = [text.replace(bad, f"\\u{ord(bad[0]):04x}{bad[1:]}") for text in calls]
    trajectory, runtime = run(tmp_path, texts, profile=HERMES_1)
    assert trajectory.stop is StopReason.FINISHED
    assert runtime.store.get(trajectory.id) == trajectory


def test_a_long_output_is_cut_and_kept_whole(tmp_path: Path) -> None:
    whole = "".join(f"{n}\n" for n in range(1000))
    last = act("python", code="print(open('.nano/output_0.txt').read().splitlines()[500])")
    trajectory, runtime = run(tmp_path, [act("shell", command="seq 0 999; touch made"), last, SUBMIT])
    cut = trajectory.turns[0].observations[0]
    assert cut.truncated
    assert cut.text.startswith(
        "[cut: first and last part of 3889 characters; all of it in .nano/output_0.txt]\n0\n"
    )
    assert cut.text.endswith("\n999")
    form = COMPACT_1.observation
    assert len(cut.text) <= form.head_tokens + form.tail_tokens + 100
    assert cut.bytes_total == len(whole)
    assert runtime.store.get_blob(str(cut.blob)).decode() == whole.rstrip("\n")
    assert seen(trajectory)[1] == "500"
    assert ".nano" not in trajectory.diff
    assert cut.files_changed == ("made",)


def test_each_call_of_a_turn_keeps_its_own_output(tmp_path: Path) -> None:
    two = act("shell", HERMES_1, command="yes a | head -c 9000") + act(
        "shell", HERMES_1, command="yes b | head -c 9000"
    )
    look = act("shell", HERMES_1, command="head -c 1 .nano/output_0.txt; head -c 1 .nano/output_0_1.txt")
    trajectory, _ = run(tmp_path, [two, look, act("submit", HERMES_1)], profile=HERMES_1)
    first, second, third, _ = seen(trajectory)
    assert ".nano/output_0.txt" in first
    assert ".nano/output_0_1.txt" in second
    assert third == "ab"


def test_the_agent_may_stand_in_the_way_of_its_outputs(tmp_path: Path) -> None:
    trajectory, _ = run(tmp_path, [act("shell", command="touch .nano; seq 999"), SUBMIT])
    assert trajectory.stop is StopReason.FINISHED
    assert trajectory.turns[0].observations[0].blob


@pytest.mark.slow
def test_a_workspace_that_outgrew_its_limits_is_an_observation(tmp_path: Path) -> None:
    grow = act("shell", command="for i in 1 2 3; do truncate -s 180M $i; done")
    trajectory, _ = run(tmp_path, [grow, act("shell", command="rm 1 2 3; echo ok > a.py"), SUBMIT])
    assert seen(trajectory)[0].startswith("error: the workspace outgrew 512 MB")
    assert trajectory.turns[1].observations[0].files_changed == ("a.py",)
    assert trajectory.stop is StopReason.FINISHED


def test_each_turn_has_a_seed_of_its_own_that_the_runs_seed_decides(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, ["@calculate\n1", SUBMIT])
    trajectory = run_task(a_task(), runtime, seed=7)
    seeds = [turn.completion.sampling.seed for turn in trajectory.turns]
    assert seeds == [turn_seed(7, 0), turn_seed(7, 1)]
    assert seeds[0] != seeds[1]
    assert turn_seed(None, 0) is None


NATIVE = find_profile("native-1-hermes-json")
FENCED = '```json\n{"name": "calculate", "arguments": {"expression": "1+1"}}\n```'


def test_a_fenced_call_is_executed_and_the_repair_is_logged(tmp_path: Path) -> None:
    trajectory, runtime = run(tmp_path, [FENCED, act("submit", NATIVE)], profile=NATIVE)
    assert (trajectory.stop, seen(trajectory)[0]) == (StopReason.FINISHED, "2")
    assert runtime.store.get(trajectory.id).turns[0].repairs == ("fenced_block",)


@pytest.mark.parametrize("profile", ["native-1-hermes-json", "api-1"])
def test_something_like_a_call_never_ends_a_run_as_its_answer(tmp_path: Path, profile: str) -> None:
    missed = [
        "```bash\nls\n```",
        '{"name": "send_mail", "arguments": {"to": "me"}}',
        "read_file(path='a.py')",
    ]
    trajectory, _ = run(tmp_path, missed, profile=find_profile(profile))
    assert trajectory.stop is StopReason.FORMAT_ERRORS
    assert '{"command": "ls"}' in seen(trajectory)[0]
    assert "unknown tool send_mail; the tools are read_file, " in seen(trajectory)[1]


class Repeating(ScriptedPolicy):
    """Says what is scripted; what it marks repeated itself and was ended."""

    def complete(self, *asked: Any, **more: Any) -> Any:
        completion = super().complete(*asked, **more)
        finish = Finish.REPETITION if "again" in completion.text else completion.finish
        return completion.model_copy(update={"finish": finish})


def test_an_answer_that_repeats_itself_is_told_once_and_ends_the_run_the_second_time(tmp_path: Path) -> None:
    good, bad = act("calculate", NATIVE, expression="1+1"), "again " * 40
    for texts, stop in (
        ([bad, good, bad], StopReason.REPETITION),
        ([bad, act("submit", NATIVE)], "finished"),
    ):
        (folder := tmp_path / str(stop)).mkdir()
        trajectory, runtime = run(folder, texts, profile=NATIVE, policy=Repeating(texts))
        assert trajectory.stop == stop
        assert "your answer repeated itself" in seen(trajectory)[0]
        assert runtime.store.get(trajectory.id) == trajectory
