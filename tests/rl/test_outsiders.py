"""Checkers of checkers that others wrote find nothing to complain of in our graders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bohrin.api import Shape, Source, battery, positive_controls
from bohrin.api import Task as Audited
from falsepass import runner as falsepass
from gradecheck.runner import run

from nano_coder.grading.grade import grade_folder
from nano_coder.sandbox.protocol import open_sandbox
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

REFERENCES = {
    "add_all": ("def add_all(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return total\n",
                [([[1, 2]], 3), ([[]], 0), ([[5, -7, 4]], 2)]),
    "longest": ("def longest(words):\n    best = ''\n    for word in words:\n        if len(word) > len(best):\n"
                "            best = word\n    return best\n",
                [([["a", "bcd", "ef"]], "bcd"), ([[]], ""), ([["xy", "zw"]], "xy")]),
    "count": ("def count(text, letter):\n    found = {}\n    for c in text:\n        found[c] = found.get(c, 0) + 1\n"
              "    return found.get(letter, 0)\n", [(["banana", "a"], 3), (["", "x"], 0), (["abc", "c"], 1)]),
}  # fmt: skip


def _task(name: str) -> Task:
    cases = tuple(Case(args=list(args), expected=expected) for args, expected in REFERENCES[name][1])
    hidden = CaseChecks(entry_point=name, cases=cases)
    return Task(key=name, prompt=f"Write {name}.", artifacts=("solution.py",), hidden=hidden)


def _reward(task: Task, source: str, folder: Path) -> float | None:
    (folder / "solution.py").write_text(source)
    return grade_folder(task, folder, None, open_sandbox()).reward


@pytest.mark.some(1)
@pytest.mark.parametrize("name", REFERENCES)
def test_bohrin_every_wrong_program_is_refused_and_every_rewriting_is_paid(name: str, tmp_path: Path) -> None:
    task = _task(name)
    audited = Audited(id=name, prompt=task.prompt, reference=REFERENCES[name][0], shape=Shape.PROGRAM)
    wrong = [c.payload.text for c in battery(audited).grounded if isinstance(c.payload, Source)]
    right = [control.payload.text for control in positive_controls(audited)]
    assert wrong
    assert len(right) > 1
    assert [text for text in wrong if _reward(task, text, tmp_path) != 0] == []
    assert [text for text in right if _reward(task, text, tmp_path) != 1] == []


@pytest.mark.slow
def test_gradecheck_its_attacks_do_not_fool_the_command(tmp_path: Path) -> None:
    source, cases = REFERENCES["add_all"]
    row = {"id": "a", "prompt": "p", "entry_point": "add_all", "files": {"solution.py": "def add_all(xs): ...\n"},
           "cases": [{"args": args, "expected": expected} for args, expected in cases]}  # fmt: skip
    (tmp_path / "task.jsonl").write_text(json.dumps(row))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "solution.py").write_text("def add_all(xs):\n    return 0\n")
    command = f"{sys.executable} -c 'from nano_rl.cli import main; main()' grade --json --task task.jsonl --workspace"
    config = tmp_path / "env.toml"
    config.write_text(
        "[env]\nname = 'adds'\nworkspace = 'work'\nsource_globs = ['*.py']\n"
        f"[grade]\ncmd = {json.dumps(command + ' {workspace}')}\npass_marker = '\"reward\": 1.0'\n"
    )
    report = run(config)
    assert report.findings
    assert {finding.attack: finding.summary for finding in report.fooled} == {}
    (tmp_path / "work" / "solution.py").write_text(source)
    assert _reward(_task("add_all"), source, tmp_path / "work") == 1.0


REFUSED = {"sentence_after", "trailing_period_inside_slot", "answer_case_swapped"}
"""what falsepass calls right, and an answer that is compared whole is not: more words, a full stop, other letters"""
BLANKS = {"surrounding_whitespace", "crlf_line_endings", "padding_inside_slot"}
"""right where a text is submitted; where a function returns it, it is another text"""


@pytest.mark.parametrize(
    ("graded", "examples", "refused"),
    [("submitted", 12, REFUSED), pytest.param("returned", 3, REFUSED | BLANKS, marks=pytest.mark.slow)],
)
def test_falsepass_no_wrong_completion_is_paid(
    graded: str, examples: int, refused: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # falsepass changes it
    tasks = make_tasks(levels=[1], n=examples, seed=1, split=Split.TRAIN, views=["predict", "calculate"])
    rows = [{"prompt": task.prompt, "answer": task.hidden.answer} for task in tasks if task.hidden]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = Path(__file__).with_name("falsepass_rewards.py")
    (tmp_path / "env.toml").write_text(
        f"[env]\nid = 'nano'\nframework = 'reward'\ntask = {json.dumps(str(rewards))}\n"
        f"dataset = {json.dumps(str(tmp_path / 'rows.jsonl'))}\nfunctions = ['{graded}']\n"
    )
    found = falsepass.run(tmp_path, n=examples, few=2, search_calls=30, search_examples=1, jobs=1)["results"]
    wrong = [one for one in found if one["expected"] == "zero" and one["probe"] != "P12"]  # P12: the data set
    assert len(wrong) > 20 * examples
    assert [one for one in wrong if one["score"] != 0] == []
    assert [one for one in found if one["errors"]] == []
    right = {one["variant"]: one["score"] for one in found if one["probe"] in ("P1", "P2")}
    assert right["reference"] == 1
    assert {variant for variant, score in right.items() if score != 1} <= refused
    assert all(one["passed"] for one in found if one["probe"] == "P11")  # the same twice
