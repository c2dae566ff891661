"""Profile repair-1: the program locates, shows one place after another and checks; the policy edits lines."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from executions import a_runtime, a_task, limits, prompt_proof

from nano_coder import config
from nano_coder.agent.dialects import line_edit
from nano_coder.agent.dialects.line_edit import LINE_EDIT
from nano_coder.agent.profiles import REPAIR_1
from nano_coder.commands.options import Setup
from nano_coder.commands.run import with_advice
from nano_coder.config import AgentConfig
from nano_coder.models import catalogue, opening
from nano_coder.run.execution import Runtime, Stop, grade_run, resume_run, run_task
from nano_coder.run.tries import run_tries
from nano_coder.run_formats import message_rows
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools import repair
from nano_coder.verify.trainable import verify
from nano_rl.cli import cli as rl
from nano_rl.imitation import imitated_samples, row_conversations, solved_oracles
from nano_shared import extension_points
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import CommandChecks
from nano_shared.types import OracleAction, Sampling, StopReason, Task, ToolCall, Trajectory, Turn

MATHS = """def half(n):
    return n // 2


def third(n):
    share = half(n)
    return n + share


def unused(n):
    return n
"""
TESTS = """import unittest
from maths import third, unused


class TestMaths(unittest.TestCase):
    def test_third(self):
        n = 8
        self.assertEqual(third(n), 4)

    def test_unused(self):
        self.assertEqual(unused(2), 2)
"""
CHECK = "python -m unittest -q test_maths"
FILES = {"maths.py": MATHS, "test_maths.py": TESTS}
WRONG, RIGHT = "2|    return n // 3", "7|    return n - share"


@pytest.fixture(autouse=True)
def seven_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "ANSWERS", 7)


def broken(**changes: Any) -> Task:
    return a_task(**{"files": FILES, "check": CHECK, "limits": limits()} | changes)


def repairing(folder: Path, texts: list[str], **changes: Any) -> Runtime:
    sandbox = open_sandbox(python=sys.executable)
    return a_runtime(
        folder, texts, **{"profile": REPAIR_1, "sandbox": sandbox, "sampling": Sampling()} | changes
    )


def shown(run: Trajectory) -> list[str]:
    """The user message of each turn."""
    return [turn.messages[-1].content for turn in run.turns]


def test_places_are_shown_one_after_another_until_the_check_passes(tmp_path: Path) -> None:
    runtime = repairing(
        tmp_path, [WRONG, "2|    return n", "The line is:\n```\n7|    return n - share\n```\n"]
    )
    run = grade_run(run_task(broken(), runtime), runtime)
    assert (run.stop, run.reward, len(run.turns)) == (StopReason.FINISHED, 1.0, 3)
    assert run.diff.count("\n-") == 2  # the file's head, and the one line
    first, again, second = shown(run)
    assert again == first.replace("Write each", f"Tried, and the tests still fail:\n{WRONG}\nWrite each")
    test = (
        "    def test_third(self):\n        n = 8\n>       self.assertEqual(third(n), 4)\n"
        "E       AssertionError: 12 != 4\n"
    )
    assert test in first
    assert test in second
    assert "maths.py:\n1|def half(n):\n2|    return n // 2\n\nThe likeliest lines" in first
    assert (
        "maths.py:\n5|def third(n):\n6|    share = half(n)\n7|    return n + share\n\nThe likeliest lines"
        in second
    )
    assert [turn.observations[0].ok for turn in run.turns] == [False, False, True]
    assert "taken back" in run.turns[0].observations[0].text
    assert run.turns[0].snapshot == run.snapshot
    assert run.turns[2].repairs == ("fence", "text beside the edit")


def test_its_runs_are_proved_admitted_and_imitated_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = repairing(tmp_path, [WRONG, WRONG, RIGHT, *[WRONG] * 7])
    task = broken(hidden=CommandChecks(command=CHECK), tools=("read_file", "submit"))
    runs = [grade_run(run_task(task, runtime, seed=seed), runtime) for seed in (1, 2)]
    assert [run.reward for run in runs] == [1.0, 0.0]
    assert runs[1].stop is StopReason.GAVE_UP
    assert "7 answers to 2 places" in str(runs[1].stop_detail)
    assert shown(runs[0]) == shown(runs[1])[:3]
    for run, turns in zip(runs, (3, 7), strict=True):
        assert not [finding.text for finding in verify(run) if finding.blocks]
        assert prompt_proof(run, runtime).equal == turns
        assert [t.completion.tokens and t.completion.tokens.row for t in run.turns] == [*range(turns)]
    rows = row_conversations(runtime.store.get(runs[0].id), REPAIR_1, runtime.store.blobs)
    assert [[m.content for m in row.messages][1] for row, _ in rows] == shown(runs[0])
    (imitated,) = imitated_samples(runs[0])  # the row whose edit was taken back teaches nothing
    assert imitated.num_action_tokens == len(RIGHT) + 1
    assert [m["content"] for m in message_rows(runs[0], ())["messages"]] == [
        REPAIR_1.system, shown(runs[0])[2], RIGHT,
    ]  # fmt: skip
    monkeypatch.setattr(opening, "SHIPPED", tmp_path / "nothing is shipped")
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    with pytest.raises(SystemExit):
        run_command(rl, ["admit", "--log", str(tmp_path / "log.db"), "--json"])
    assert json.loads(capsys.readouterr().out)["uses"]["policy gradient"] == 2


def test_a_round_begins_with_the_likeliest_place_and_goes_one_place_further(tmp_path: Path) -> None:
    run = run_task(broken(), repairing(tmp_path, [WRONG, RIGHT.replace("- share", "* share")] * 4))
    assert [text.count("5|def third(n):") for text in shown(run)] == [0, 0, 1, 0, 1, 0, 1]
    assert [text.count("Tried") for text in shown(run)] == [0, 1, 0, 1, 1, 1, 1]
    assert shown(run)[5].count(WRONG) == 1, "the same answer is told once"
    assert repair._in_turn("abcd", 4) == list("aababcabcd")[:7]


def test_a_model_that_quotes_lines_without_their_indentation_edits_them(tmp_path: Path) -> None:
    run = run_task(broken(), repairing(tmp_path, [WRONG, WRONG, "7: `return n - share`"]))
    assert (run.stop, run.turns[2].repairs) == (StopReason.FINISHED, ("quoted",))
    assert "\n+    return n - share\n" in run.diff
    prose = run_task(broken(), repairing(tmp_path, ["7: the sign is wrong", *[WRONG] * 6]))
    assert prose.turns[0].parse_error is not None


def test_what_an_older_version_could_not_read_may_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(line_edit, "_QUOTED", re.compile("$a"))
        runtime = repairing(tmp_path, ["7: `return n - share`", *[WRONG] * 6])
        run = grade_run(run_task(broken(), runtime), runtime)
    assert run.turns[0].parse_error is not None
    assert LINE_EDIT.parse(run.turns[0].completion.text, ()).calls
    assert not [finding.text for finding in verify(run) if finding.blocks]


def test_what_is_no_edit_of_the_place_is_told_and_the_next_place_follows(tmp_path: Path) -> None:
    runtime = repairing(tmp_path, ["12|x = 1", "12|x = 1", *["7|    return n + share"] * 5])
    run = run_task(broken(), runtime)
    said = [turn.observations[0].text for turn in run.turns][1:3]
    assert said == [
        "error: line 12 is none of those shown, 1 to 2",
        "error: nothing changed: the file reads like that already",
    ]
    assert (run.stop, run.diff) == (StopReason.GAVE_UP, "")
    refused = run_task(broken(), repairing(tmp_path, ["There is no bug.", *["13"] * 6]))
    assert all(turn.parse_error is not None for turn in refused.turns)


def test_a_run_that_was_stopped_goes_on_at_its_place(tmp_path: Path) -> None:
    run = run_task(broken(), repairing(tmp_path, [WRONG]))
    assert (run.stop, len(run.turns)) == (StopReason.POLICY_ERROR, 1)
    repair._located.clear()  # as in another process
    runtime = repairing(tmp_path, [WRONG, RIGHT])
    resumed = resume_run(run.id, runtime)
    assert (resumed.stop, len(resumed.turns)) == (StopReason.FINISHED, 3)
    assert WRONG in shown(resumed)[1]
    assert "5|def third(n):" in shown(resumed)[2]
    assert prompt_proof(resumed, runtime).equal == 3


def test_tries_share_the_prompt_and_locate_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair._located.clear()
    located, traced = list[int](), repair.traced
    monkeypatch.setattr(repair, "traced", lambda *a: located.append(1) or traced(*a))
    runs = run_tries(broken(key="tries"), repairing(tmp_path, [WRONG] * 21), 3, Stop(), seed=1)
    assert len(runs) == 3
    assert len({tuple(shown(run)) for run in runs}) == len(located) == 1


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("true", "`true` passes: there is nothing to repair"),
        ("echo no such thing; exit 3", "repair-1 needs a check .*: no such thing"),
    ],
)
def test_a_check_that_leads_nowhere_ends_the_run_with_a_sentence(
    tmp_path: Path, check: str, words: str
) -> None:
    run = run_task(broken(check=check), repairing(tmp_path, []))
    assert (run.stop, run.turns) == (StopReason.GAVE_UP, ())
    assert re.search(words, str(run.stop_detail))


def test_a_task_without_a_visible_check_is_refused_before_it_is_logged(tmp_path: Path) -> None:
    runtime = repairing(tmp_path, [])
    with pytest.raises(UsageError, match="repair-1 needs a check that the run may see"):
        run_task(broken(check=None, hidden=CommandChecks(command=CHECK)), runtime)
    assert not runtime.store.runs()


@pytest.mark.parametrize(
    ("text", "edits"),
    [
        ("12|    return a | b", [(12, "    return a | b")]),
        ("```python\n3|x = 1\n4|\n```", [(3, "x = 1"), (4, "")]),
        ("`7|    y`", [(7, "    y")]),
        ("2|a\n2|b\r\n", [(2, "a"), (2, "b")]),
        ("12: `return a`\n13:`x`", [(12, "return a"), (13, "x")]),
    ],
)
def test_the_whole_answer_is_an_edit_of_lines(text: str, edits: list[tuple[int, str]]) -> None:
    parsed = LINE_EDIT.parse(text, ())
    (call,) = parsed.calls
    assert call.arguments == {"edits": [{"line": line, "text": new} for line, new in edits]}
    again = LINE_EDIT.render(parsed.thought, parsed.calls, ())
    assert LINE_EDIT.parse(again, ()).calls == parsed.calls


@pytest.mark.parametrize("edits", [[], None, [{"line": 1}], [{"line": 1, "text": "a\nb"}]])
def test_what_the_dialect_would_read_otherwise_it_does_not_write(edits: Any) -> None:
    with pytest.raises(ValueError, match=r"edit"):
        LINE_EDIT.render("", (ToolCall(name="edit_line", arguments={"edits": edits}),), ())


# ------------------------------------------------------------------------------------ the default


@pytest.fixture
def advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str | None, str | None]]:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    entry = "hub = 'a/b'\nfile = 'x.gguf'\nbytes = 1\nchecked_profile = 'repair-1'\n"
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "config.toml").write_text(f"[catalogue.little]\n{entry}sha256 = '{'0' * 64}'\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def found(**settings: Any) -> tuple[str | None, str | None]:
        config = with_advice(Setup(AgentConfig(**settings), {})).config
        return config.model, config.profile

    return found


def test_a_fetched_model_that_repairs_is_the_default_under_a_check(
    advised: Callable[..., tuple[str | None, str | None]],
) -> None:
    assert advised(check=CHECK) == (None, None)
    assert advised(check=CHECK, model="little") == ("little", "repair-1")
    file = catalogue._place(config.catalogue()["little"])
    file.parent.mkdir(parents=True)
    file.touch()
    assert advised(check=CHECK) == ("little", "repair-1")
    assert advised() == (None, None)
    assert advised(check=CHECK, model="little", profile="compact-1") == ("little", "compact-1")
    assert advised(check=CHECK, model="shipped") == ("shipped", None)
    assert advised(check=CHECK, base_url="http://localhost:1/v1") == (None, None)


def test_a_checkpoint_of_a_package_goes_before_the_fetched_model_that_it_is_trained_on(
    advised: Callable[..., tuple[str | None, str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "nano" / "config.toml").open("a") as file:
        file.write("checked_policy = 'mender'\n")
    package = tmp_path / "site" / "mender-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mender\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[nano.checkpoints]\nmender = mender:FOLDER\n")
    (tmp_path / "site" / "mender.py").write_text(
        "from pathlib import Path\nFOLDER = Path(__file__).parent / 'p'\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    for cached in (extension_points._entry_points, extension_points._registered):
        cached.cache_clear()
    assert advised(check=CHECK, model="little") == ("little", "repair-1"), "its base is not fetched"
    file = catalogue._place(config.catalogue()["little"])
    file.parent.mkdir(parents=True)
    file.touch()
    assert advised(check=CHECK) == ("mender", None)
    assert advised(check=CHECK, model="little") == ("mender", None)
    assert advised(check=CHECK, model="little", profile="repair-1") == ("little", "repair-1")
    assert opening.at_hand("mender") == str(tmp_path / "site" / "p")
    monkeypatch.undo()
    for cached in (extension_points._entry_points, extension_points._registered):
        cached.cache_clear()


def test_a_terminal_is_told_once_what_one_command_brings(
    advised: Callable[..., tuple[str | None, str | None]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    advised(check=CHECK)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for _ in range(2):
        advised(check=CHECK)
    said = capsys.readouterr().err
    assert said.count("nano-coder models get coder-1.5b brings a model") == 1


EDITS: list[dict[str, Any]] = [
    {"path": "maths.py", "line": 7, "new": "    return n - share\n"},
    {"path": "maths.py", "old": "    return n + share", "new": "    return n - share"},
    {"path": "maths.py", "old": "    share = half(n)\n    return n + share\n",
     "new": "    share = half(n)\n    share += 0\n    return n - share\n"},
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_oracle_edits_the_place_that_it_is_shown(tmp_path: Path, edit: dict[str, Any]) -> None:
    actions = (OracleAction(name="read_file", arguments={"path": "maths.py"}),
               OracleAction(name="edit_file", arguments=edit), OracleAction(name="submit"))  # fmt: skip
    task = broken(oracle=actions)
    runtime = repairing(tmp_path, [])
    (run,) = solved_oracles([task], runtime)
    assert [turn.parse_error is None for turn in run.turns] == [False, False, True]
    assert run.turns[2].calls[0].arguments["edits"][-1] == {"line": 7, "text": "    return n - share"}
    rows = row_conversations(run, REPAIR_1)
    assert imitates(rows) == [[False], [False], [True]]
    other = OracleAction(name="edit_file", arguments={"path": "elsewhere.py", "line": 1, "new": "x"})
    assert solved_oracles([broken(key="other", oracle=(other,))], runtime) == []


def imitates(rows: Sequence[tuple[Any, Sequence[Turn | None]]]) -> list[list[bool]]:
    return [[turn is not None and not turn.refused for turn in turns] for _, turns in rows]
