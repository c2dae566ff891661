"""A task is trained on only after its own check has told right from nothing, alone and without a network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nano_coder.run.execution import Runtime
from nano_mining.task_check import check_task, scratch_runtime
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.types import OracleAction, Split, Task

CONNECTS = (
    "import socket\n"
    "def least(a, b):\n    socket.create_connection(('1.1.1.1', 53), 2)\n    return min(a, b)\n"
)


def least(source: str, starter: str = "") -> Task:
    cases = tuple(Case(args=[a, b], expected=min(a, b)) for a, b in ((1, 2), (2, 1), (5, 5), (-3, 4)))
    return Task(
        key="least", prompt="Write least(a, b) to low.py.", artifacts=("low.py",),
        files={"low.py": starter} if starter else {}, tools=("write_file", "submit"),
        hidden=CaseChecks(entry_point="least", cases=cases),
        oracle=(
            OracleAction(name="write_file", arguments={"path": "low.py", "content": source}),
            OracleAction(name="submit"),
        ),
        split=Split.TRAIN, program_hash="p",
    )  # fmt: skip


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    opened = scratch_runtime(str(tmp_path_factory.mktemp("check")))
    yield opened
    opened.store.close()


def test_ac_40_the_oracle_earns_everything_and_doing_nothing_earns_nothing(runtime: Runtime) -> None:
    right = "def least(a, b):\n    if a < b:\n        return a\n    return b\n"
    assert check_task(least(right), runtime).admitted
    wrong = check_task(least("def least(a, b):\n    return a\n"), runtime)
    assert not wrong.admitted
    assert "instead of 1" in wrong.checks["oracle"]
    done = check_task(least(right, starter=right), runtime)
    assert not done.admitted
    assert "instead of 0" in done.checks["starter"]


def test_ac_40_a_solution_that_needs_the_network_earns_nothing(runtime: Runtime) -> None:
    found = check_task(least(CONNECTS), runtime)
    assert not found.admitted
    assert "earns 0 instead of 1" in found.checks["oracle"]
