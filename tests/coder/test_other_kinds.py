"""State, mutants, bounds and reward files: what each pays, and what it refuses to believe."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nano_coder.grading.grade import grade_folder
from nano_coder.grading.reward_file import BadReward, read_reward, reward_path
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_shared.errors import UsageError
from nano_shared.types import Limits, Task, Verdict
from nano_suites.checks.end_state import Unreadable, read_json
from nano_suites.checks.measured_cases import measure


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    return work


def _task(hidden: dict[str, Any], **more: Any) -> Task:
    return Task.model_validate({"key": "k", "prompt": "p", "hidden": hidden, **more})


def _state(sandbox: Sandbox, folder: Path, *checks: dict[str, Any], answer: str | None = None) -> Verdict:
    return grade_folder(_task({"kind": "state", "state": list(checks)}), folder, answer, sandbox)


# ------------------------------------------------------------------------------------------- state


def _database(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_every_kind_of_state_is_compared(sandbox: Sandbox, folder: Path) -> None:
    (folder / "a.txt").write_text("one\ntwo")
    (folder / "a.json").write_text('{"b": [1, 2.5, null]}')
    (folder / "a.csv").write_text("name,size\nx,1\ny,2.50\n")
    _database(
        folder / "a.db", "CREATE TABLE t (n INTEGER, s TEXT)", "INSERT INTO t VALUES (1, 'x'), (2, 'y')"
    )
    verdict = _state(
        sandbox, folder,
        {"kind": "text", "path": "a.txt", "expected": "one\ntwo\n"},
        {"kind": "absent", "path": "gone"},
        {"kind": "json", "path": "a.json", "expected": {"b": [1, 2.5, None]}},
        {"kind": "csv", "path": "a.csv", "expected": [["name", "size"], ["x", 1], ["y", 2.5]]},
        {"kind": "csv", "path": "a.csv", "ordered": False,
         "expected": [{"name": "y", "size": 2.5}, {"name": "x", "size": 1}]},
        {"kind": "sql", "path": "a.db", "query": "SELECT n, s FROM t", "ordered": False,
         "expected": [[2, "y"], [1, "x"]]},
        {"kind": "answer", "expected": 7},
        answer="7",
    )  # fmt: skip
    assert verdict.checks == {f"state_{n}": "pass" for n in range(1, 8)}
    assert (verdict.reward, verdict.trust) == (1.0, "hidden")


def test_wrong_state_earns_nothing_and_its_fraction_is_told(sandbox: Sandbox, folder: Path) -> None:
    (folder / "a.json").write_text('{"b": true}')
    (folder / "there").mkdir()
    _database(folder / "a.db", "CREATE TABLE t (n INTEGER)", "INSERT INTO t VALUES (1)")
    verdict = _state(
        sandbox, folder,
        {"kind": "json", "path": "a.json", "expected": {"b": 1}},
        {"kind": "absent", "path": "there"},
        {"kind": "text", "path": "missing", "expected": ""},
        {"kind": "sql", "path": "a.db", "query": "SELECT n FROM t", "expected": [[1]]},
    )  # fmt: skip
    assert list(verdict.checks.values()) == ["fail", "fail", "error", "pass"]
    assert (verdict.reward, verdict.components, verdict.failure_kind) == (0.0, {"tests": 0.25}, "no_artifact")


@pytest.mark.slow
def test_a_database_that_is_none_that_hangs_or_that_writes_earns_nothing(
    sandbox: Sandbox, folder: Path
) -> None:
    (folder / "none.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r"
    _database(folder / "hang.db", f"CREATE VIEW t AS SELECT count(*) AS n FROM ({endless})")
    _database(folder / "wrong.db", "CREATE TABLE other (n)")
    verdict = _state(
        sandbox,
        folder,
        *(
            {"kind": "sql", "path": f"{name}.db", "query": "SELECT n FROM t", "expected": [[1]]}
            for name in ("none", "hang", "wrong")
        ),
    )
    assert set(verdict.checks.values()) == {"error"}
    assert verdict.reward == 0.0


def test_rows_that_are_still_in_the_write_ahead_log_count(sandbox: Sandbox, folder: Path) -> None:
    connection = sqlite3.connect(folder / "a.db")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (n)")
    connection.execute("INSERT INTO t VALUES (5)")
    connection.commit()
    verdict = _state(
        sandbox, folder, {"kind": "sql", "path": "a.db", "query": "SELECT n FROM t", "expected": [[5]]}
    )
    connection.close()
    assert verdict.reward == 1.0


def test_a_link_to_the_right_state_is_not_followed(sandbox: Sandbox, folder: Path) -> None:
    (folder.parent / "right.json").write_text("1")
    (folder / "a.json").symlink_to("../right.json")
    verdict = _state(sandbox, folder, {"kind": "json", "path": "a.json", "expected": 1})
    assert (verdict.reward, verdict.tampering[0].kind) == (0.0, "link")


@pytest.mark.parametrize("text", ["NaN", '{"a": 1, "a": 2}', "[" * 100_000, "1 2", "", "9" * 10_000])
def test_what_is_no_json_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        read_json(text)


# ----------------------------------------------------------------------------------------- mutants

REFERENCE = "def clip(x, low, high):\n    return max(low, min(x, high))\n"
MUTANTS = {
    "swapped": REFERENCE.replace("max", "min"),
    "low": "def clip(x, low, high):\n    return min(x, high)\n",
}
GOOD = "from clipping import clip\ndef test_it():\n    assert clip(5, 0, 3) == 3\n    assert clip(-1, 0, 3) == 0\n"


def _mutants(sandbox: Sandbox, folder: Path, tests: str) -> Verdict:
    hidden = {"kind": "mutants", "mutants": MUTANTS, "reference": REFERENCE, "module": "clipping.py"}
    (folder / "test_clipping.py").write_text(tests)
    task = _task(hidden, files={"clipping.py": REFERENCE}, artifacts=["test_clipping.py"])
    return grade_folder(task, folder, None, sandbox)


@pytest.mark.slow
def test_tests_that_find_every_mutant_earn_one(sandbox: Sandbox, folder: Path) -> None:
    verdict = _mutants(sandbox, folder, GOOD)
    assert (verdict.reward, verdict.components) == (1.0, {"mutants_killed": 1.0})


@pytest.mark.slow
def test_tests_that_find_some_mutants_are_told_which(sandbox: Sandbox, folder: Path) -> None:
    verdict = _mutants(
        sandbox, folder, "from clipping import clip\ndef test_it():\n    assert clip(5, 0, 3) == 3\n"
    )
    assert verdict.reward == 0.0
    assert verdict.components == {"mutants_killed": 0.5}
    assert verdict.checks == {"reference": "pass", "killed_swapped": "pass", "killed_low": "fail"}


CHEATS = {
    "fails always": "from clipping import clip\ndef test_it():\n    assert clip(5, 0, 3) == 4\n",
    "passes always": "from clipping import clip\ndef test_it():\n    clip(5, 0, 3)\n",
    "no tests": "from clipping import clip\n",
    "reads the source": "import clipping, inspect\ndef test_it():\n    assert 'max(low' in inspect.getsource(clipping.clip)\n",
    "reads the file": "import clipping\ndef test_it():\n    assert 'max(low, min' in open(clipping.__file__).read()\n",
    "reads the bytecode": "from clipping import clip\ndef test_it():\n    assert clip.__code__.co_names == ('max', 'min')\n",
    "leaves": "import os\nos._exit(0)\n",
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("cheat", CHEATS)
def test_tests_that_do_not_test_behaviour_earn_nothing(cheat: str, sandbox: Sandbox, folder: Path) -> None:
    verdict = _mutants(sandbox, folder, CHEATS[cheat])
    assert (verdict.reward, verdict.components) == (0.0, {"mutants_killed": 0.0})


# ------------------------------------------------------------------------------------------ bounds

LONG = "def f(n):\n    if n > 0:\n        if n > 10:\n            return 2\n        return 1\n    return 0\n"
SHORT = "def f(n):\n    return (n > 0) + (n > 10)\n"
STRINGS = "def f(n):\n    return eval('2 if n > 10 else 1 if n > 0 else 0')\n"


@pytest.mark.parametrize(
    ("source", "reward", "kinds"), [(LONG, 0.0, []), (SHORT, 1.0, []), (STRINGS, 0.0, ["hidden_code"])]
)
def test_a_refactoring_keeps_the_cases_and_the_bounds(
    source: str, reward: float, kinds: list[str], sandbox: Sandbox, folder: Path
) -> None:
    hidden = {
        "kind": "cases", "entry_point": "f",
        "cases": [{"args": [n], "expected": n // 10 + 1 if n else 0} for n in (0, 5, 11)],
        "metrics": [{"name": "statements", "at_most": 3}, {"name": "nesting", "at_most": 1}],
    }  # fmt: skip
    (folder / "s.py").write_text(source)
    verdict = grade_folder(_task(hidden, artifacts=["s.py"]), folder, None, sandbox)
    assert (verdict.reward, [found.kind for found in verdict.tampering]) == (reward, kinds)
    assert verdict.components["tests"] == float("hidden_code" not in kinds)


def test_the_metrics_of_a_source(sandbox: Sandbox) -> None:
    source = '"""About."""\ndef f(a):\n    # why\n    if a and a > 1:\n        return 1\n    elif a:\n        return 2\n\n    return [x for x in a if x]\n'
    found = measure({"a.py": source.encode()}, Limits(), sandbox)
    assert found == {"statements": 6, "branches": 5, "nesting": 1, "lines": 6, "hidden": 0}
    assert measure({"a.py": b"def"}, Limits(), sandbox) is None


# -------------------------------------------------------------------------------------- reward file


def _reward(sandbox: Sandbox, folder: Path, command: str, path: str = "logs/reward.txt") -> Verdict:
    hidden = {"kind": "reward_file", "command": command, "reward_path": path}
    return grade_folder(_task(hidden, files={"main.py": "n = 0\n"}), folder, None, sandbox)


SCORE = "mkdir -p logs && python -c 'from main import n; print(n)' > logs/reward.txt"


@pytest.mark.parametrize("n", ["0", "1", "0.25"])
def test_a_reward_is_read_from_the_file(n: str, sandbox: Sandbox, folder: Path) -> None:
    (folder / "main.py").write_text(f"n = {n}\n")
    verdict = _reward(sandbox, folder, SCORE)
    assert (verdict.reward, verdict.trust, verdict.failure_kind) == (float(n), "user_check", None)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("n", "kind"),
    [
        ("float('nan')", "reward_out_of_range"), ("float('inf')", "reward_malformed"), ("1.5", "reward_out_of_range"),
        ("True", "reward_malformed"), ("''", "reward_malformed"), ("'1.0 '*2", "reward_malformed"),
    ],
)  # fmt: skip
def test_what_is_no_reward_earns_nothing(n: str, kind: str, sandbox: Sandbox, folder: Path) -> None:
    (folder / "main.py").write_text(f"n = {n}\n")
    verdict = _reward(sandbox, folder, SCORE)
    assert verdict.reward == 0.0
    assert str(verdict.failure_kind).startswith("reward_")
    assert kind.startswith("reward_")


def test_a_reward_that_was_written_beforehand_is_removed_and_named(sandbox: Sandbox, folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "reward.txt").write_text("1")
    (folder / "main.py").write_text("import os\nos._exit(0)\n")
    verdict = _reward(sandbox, folder, SCORE)
    assert verdict.reward == 0.0
    assert "reward_written" in {found.kind for found in verdict.tampering}


def test_a_reward_through_a_link_is_no_reward(sandbox: Sandbox, folder: Path) -> None:
    (folder / "main.py").write_text(
        "import os\nn = 1\nopen('/work/one', 'w').write('1')\nos.remove('/work/logs/reward.txt')\n"
        "os.symlink('/work/one', '/work/logs/reward.txt')\n"
    )
    verdict = _reward(sandbox, folder, SCORE)
    assert verdict.reward == 0.0
    assert [found.kind for found in verdict.tampering] == ["reward_written"]


def test_a_command_that_never_leaves_a_reward_is_our_failure(sandbox: Sandbox, folder: Path) -> None:
    (folder / "main.py").write_text("n = 1\n")
    verdict = _reward(sandbox, folder, "true")
    assert (verdict.reward, str(verdict.failure_kind)[:14]) == (None, "verifier_error")


def test_several_rewards_need_one_that_is_called_reward() -> None:
    assert read_reward('{"reward": 0.5, "style": 1}') == {"reward": 0.5, "style": 1.0}
    assert read_reward('{"accuracy": 0.5}') == {"accuracy": 0.5, "reward": 0.5}
    with pytest.raises(BadReward, match="none of"):
        read_reward('{"a": 0.5, "b": 1}')
    with pytest.raises(BadReward, match="none of"):
        read_reward("{}")


def test_a_reward_path_stays_in_the_workspace() -> None:
    assert reward_path("/work/logs/../r.txt") == "r.txt"
    for outside in ("/logs/reward.txt", "../r", "."):
        with pytest.raises(UsageError):
            reward_path(outside)


# ----------------------------------------------------------------------------------------- command

CHECK = "python -m unittest -q checks"
CHECKS = "import unittest\nfrom main import n\nclass T(unittest.TestCase):\n    def test_n(self):\n        self.assertEqual(n, 1)\n"


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("planted", "reward", "kind"),
    [
        ({"main.py": "n = 1\n"}, 1.0, None),
        ({"main.py": "import os\nos._exit(0)\n"}, 0.0, "exit"),
        ({"main.py": "import sys\nsys.exit(0)\n"}, 0.0, "exit"),
        ({"main.py": "import unittest\nraise unittest.SkipTest('no')\n"}, 0.0, None),
        ({"main.py": "n = 0\n", "unittest.py": "print('Ran 1 test in 0s\\n\\nOK')\n"}, 0.0, "shadowing"),
        ({"main.py": "n = 0\n", "packaging/__init__.py": "import os\nos._exit(0)\n"}, 0.0, "shadowing"),
    ],
)
def test_a_check_by_unittest_is_counted(
    planted: dict[str, str], reward: float, kind: str | None, sandbox: Sandbox, folder: Path
) -> None:
    for name, text in planted.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "checks.py").write_text(CHECKS)
    task = _task({"kind": "command", "command": CHECK}, files={"main.py": "n = 0\n", "checks.py": CHECKS})
    verdict = grade_folder(task, folder, None, sandbox)
    assert verdict.reward == reward
    assert kind is None or kind in {found.kind for found in verdict.tampering}


def test_a_test_file_that_the_command_names_is_the_original(sandbox: Sandbox, folder: Path) -> None:
    test = "from main import n\ndef test_n():\n    assert n == 1\n"
    (folder / "main.py").write_text("n = 0\n")
    (folder / "spec.py").write_text("def test_n():\n    pass\n")
    hidden = {"kind": "command", "command": "python -m pytest -q spec.py"}
    verdict = grade_folder(_task(hidden, files={"spec.py": test}), folder, None, sandbox)
    assert (verdict.reward, [found.kind for found in verdict.tampering]) == (0.0, ["tests"])
