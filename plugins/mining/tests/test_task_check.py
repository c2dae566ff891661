"""Admission: good tasks pass every check, and each defect is refused by its own name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from nano_coder.run.execution import Runtime
from nano_mining import task_check as checks
from nano_mining.task_check import (
    TaskFinding,
    admitted_tasks,
    check_task,
    scratch_runtime,
    without_repeats,
)
from nano_rl.cli import cli
from nano_rl.tasks.task_file import read_tasks, unproven, write_tasks
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import AnswerChecks, Case, CaseChecks, HiddenChecks, Suite, SuiteChecks
from nano_shared.types import OracleAction, Provenance, Split, Task, Trajectory, Verdict
from nano_suites.drawing import draw_tasks
from nano_suites.functions.views import SUITE, VIEWS

SOURCE = "def least(a, b):\n    if a < b:\n        return a\n    return b\n"
CASES = tuple(Case(args=[a, b], expected=min(a, b)) for a, b in ((1, 2), (2, 1), (5, 5), (-3, 4), (9, -9)))
GOOD = Task(
    key="least", prompt="Write least(a, b) to min2.py.", artifacts=("min2.py",),
    tools=("write_file", "submit"), hidden=CaseChecks(entry_point="least", cases=CASES),
    oracle=(
        OracleAction(name="write_file", arguments={"path": "min2.py", "content": SOURCE}),
        OracleAction(name="submit"),
    ),
    split=Split.TRAIN, program_hash="p",
)  # fmt: skip
TESTS = "from min2 import least\ndef test_a(tmp_path):\n    assert least(2, 1) == 1 and least(1, 2) == 1\n"
QUESTION = Task(
    key="question", prompt="What is 6 times 7?", tools=("submit",),
    hidden=AnswerChecks(answer="42"),
    oracle=(OracleAction(name="submit", arguments={"answer": "42"}),),
)  # fmt: skip


def but(task: Task, **changes: object) -> Task:
    return task.model_copy(update=changes)


def with_cases(*cases: Case) -> HiddenChecks:
    return CaseChecks(entry_point="least", cases=cases)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    opened = scratch_runtime(str(tmp_path_factory.mktemp("check")))
    yield opened
    opened.store.close()


def test_a_good_task_passes_every_check(runtime: Runtime) -> None:
    found = check_task(GOOD, runtime)
    assert found.admitted, found.reasons
    assert set(found.checks.values()) == {"pass"}
    assert found.kill_rate == 1.0


@pytest.mark.slow
def test_tests_that_no_oracle_has_passed_do_not_train(tmp_path: Path) -> None:
    suite = Suite(framework="pytest", files={"test_a.py": TESTS})
    task = but(GOOD, key="with tests", hidden=SuiteChecks(suite=suite), provenance=Provenance())
    file, checked = tmp_path / "tasks.jsonl", tmp_path / "checked.jsonl"
    write_tasks(file, [task, but(task, key="without", oracle=None)])
    train = ["train", "--name", "t", "--tasks"]
    with pytest.raises(UsageError, match=r"2 of the 2 tasks .* no oracle has passed \(with tests first\)"):
        CliRunner().invoke(cli, [*train, str(file)], catch_exceptions=False)
    said = CliRunner().invoke(cli, ["tasks", "check", str(file), "--out", str(checked), "--json"])
    found = json.loads(said.stdout)["findings"]
    assert [one["admitted"] for one in found] == [True, False]
    assert found[0]["checks"]["apart"].startswith("skip: test_a.py uses the fixture tmp_path")
    (admitted,) = read_tasks(checked)
    assert (unproven([admitted]), admitted.id) == ([], task.id)


def test_without_a_program_mutation_testing_is_skipped_and_says_so(runtime: Runtime) -> None:
    found = check_task(QUESTION, runtime)
    assert found.admitted
    assert found.kill_rate is None
    assert found.checks["mutants"].startswith("skip: ")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("task", "check", "said"),
    [
        (but(GOOD, hidden=None), "checks", "no check"),
        (but(GOOD, oracle=None), "oracle", "no oracle"),
        (but(GOOD, oracle=(OracleAction(name="submit"),)), "oracle", "earns 0 instead of 1"),
        (but(GOOD, hidden=with_cases(Case(args=[1, 2], expected=1))), "mutants", "returns 1"),
        (but(GOOD, hidden=with_cases(CASES[0], CASES[2])), "mutants", "of the mutants die"),
        (but(GOOD, files={"min2.py": SOURCE}), "starter", "earns 1 instead of 0"),
        (but(GOOD, prompt="For example least( 9,-9 ) is -9."), "leaks", "1 of 5 hidden cases"),
        (but(GOOD, files={"t.py": "assert least(1, 2) == 1\n"}), "leaks", "least(1, 2)"),
        (
            but(
                QUESTION,
                hidden=AnswerChecks(answer="''"),
                oracle=(OracleAction(name="submit", arguments={"answer": "''"}),),
            ),
            "no_op",
            "earns 1 instead of 0",
        ),
        (
            but(GOOD, files={"min2.py": "def least(a, b):\n    while True:\n        pass\n"}),
            "starter",
            "do not end",
        ),
    ],
)
def test_each_defect_is_refused_by_name(task: Task, check: str, said: str, runtime: Runtime) -> None:
    found = check_task(task, runtime)
    assert not found.admitted
    assert said in found.checks[check]
    assert any(reason.startswith(check) for reason in found.reasons)


def test_repeated_problems_and_programs_of_another_split_are_refused() -> None:
    fine = TaskFinding(key="k", level=None, view=None, checks={"oracle": "pass"})
    tasks = [GOOD, but(GOOD, key="again"), but(GOOD, key="held", prompt="Other.", split=Split.TEST)]
    found = list(without_repeats([(t, fine) for t in tasks], others={"q": "t of held.jsonl"}))
    assert [f.admitted for _, f in found] == [True, False, False]
    assert "same prompt and files as least" in found[1][1].reasons[0]
    assert "same program as least of split train" in found[2][1].reasons[0]
    ((_, other),) = without_repeats([(but(GOOD, program_hash="q"), fine)], others={"q": "t of held.jsonl"})
    assert "held.jsonl" in other.reasons[0]


@pytest.mark.some(2)
@pytest.mark.parametrize("view", [v for v in VIEWS if v.level >= 4 or v.name == "fix_operator"],
                         ids=lambda v: f"{v.name}-{v.level}")  # fmt: skip
def test_tasks_of_the_higher_levels_are_admitted(view: object, runtime: Runtime) -> None:
    found = [check_task(SUITE.make(view, Split.TRAIN, seed), runtime) for seed in range(2)]  # type: ignore[arg-type]
    assert any(f.admitted for f in found), [f.reasons for f in found]


@pytest.mark.slow
def test_the_command_filters_a_file_and_names_the_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "tasks.jsonl", tmp_path / "admitted.jsonl"
    bad = but(GOOD, key="bad", prompt="For example least(9, -9).")
    write_tasks(source, [GOOD, bad, QUESTION])
    arguments = ["tasks", "check", str(source), "--out", str(target), "--json"]
    with pytest.raises(SystemExit) as ended:
        run_command(cli, arguments)
    assert ended.value.code in (0, None)
    report = json.loads(capsys.readouterr().out)
    assert (report["tasks"], report["admitted"]) == (3, 2)
    assert [row["admitted"] for row in report["findings"]] == [True, False, True]
    assert [t.key for t in read_tasks(target)] == ["least", "question"]


@pytest.mark.slow
def test_a_supply_is_drawn_until_enough_are_admitted_and_fewer_are_a_prefix() -> None:
    def draw(n: int, jobs: int) -> list[str]:
        drawn = draw_tasks(levels=(0, 1), seed=4, split=Split.TRAIN, views=("copy", "predict", "fix"))
        return [t.key for t in admitted_tasks(drawn, n, jobs=jobs)[0]]

    six = draw(6, 1)
    assert len(set(six)) == 6
    assert draw(3, 2) == six[:3]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("nano_mining.check_command.check_tasks", lambda *_, **__: pytest.fail("it began"))
    rows = tmp_path / "rows.jsonl"
    write_tasks(rows, [GOOD])
    for arguments in (["make", "--check", "-n", "1"], ["check", str(rows)]):
        with pytest.raises(UsageError, match="cannot be written"):
            get_command(cli).main(
                ["tasks", *arguments, "--out", str(tmp_path / "file/out.jsonl")], standalone_mode=False
            )


def test_where_nothing_is_admitted_no_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_tasks(rows, [but(GOOD, oracle=None)])
    code = get_command(cli).main(["tasks", "check", str(rows), "--out", str(out)], standalone_mode=False)
    assert (code, out.exists()) == (1, False)
    assert "is not written: no task is admitted" in capsys.readouterr().out


@pytest.mark.parametrize("asked", [["--view", "copy,emit"], ["--view", "copy", "--view", "emit"]])
def test_views_may_be_named_together_or_one_by_one(asked: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    get_command(cli).main(
        ["tasks", "make", "--level", "0", "-n", "4", *asked, "--out", str(out)], standalone_mode=False
    )
    assert {task.view for task in read_tasks(out)} == {"copy", "emit"}


COUNTS = f"calls = []\n{SOURCE}".replace(
    "a < b", "a < b and not calls.append(a) and len(calls) == 1 or a < b - 9"
)


def test_a_solution_that_wavers_in_mutation_testing_is_graded_again(runtime: Runtime) -> None:
    """Its second call in one process is wrong; the grader gives each case a process of its own."""
    written = OracleAction(name="write_file", arguments={"path": "min2.py", "content": COUNTS})
    oracle = (written, OracleAction(name="submit"))
    found = check_task(but(GOOD, oracle=oracle), runtime)
    assert (found.checks["oracle"], found.checks["repeats"]) == ("pass", "pass")


def test_a_result_that_earns_one_only_at_first_is_refused(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, graded = checks._grade, []

    def once(run: Trajectory, of: Runtime) -> Verdict | None:
        verdict = real(run, of)
        graded.append(verdict is not None and verdict.reward == 1)
        right_before = graded.count(True) > 1
        return verdict.model_copy(update={"reward": 0.0}) if verdict and right_before else verdict

    monkeypatch.setattr(checks, "_grade", once)
    found = check_task(QUESTION, runtime)
    assert found.checks["oracle"] == "pass"
    assert found.reasons == ("repeats: the oracle's result does not earn 1 every time: [1, 0.0, 0.0]",)
