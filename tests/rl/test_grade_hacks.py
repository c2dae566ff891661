"""Attacks on `nano-rl grade --task --workspace`: the 53 listed hacks and more, end to end, earn nothing."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from listed_hacks import FAIR, LISTED, OWN, RIGHT, WRONG, Hack
from typer.main import get_command

from nano_rl.cli import cli
from nano_shared.files import content_hash

CASES = [{"args": [[i, 10 * i + 3]], "expected": 11 * i + 3} for i in range(1, 9)]
VISIBLE = "from solution import add_all\ndef test_one():\n    assert add_all([1, 13]) == 14\n"
HIDDEN = "from solution import add_all\n" + "\n".join(
    f"def test_{i}():\n    assert add_all([{i}, {10 * i + 3}]) == {11 * i + 3}" for i in range(1, 9)
)
PLAIN = {
    "id": "adds", "prompt": "Add all.", "target": "solution.py", "entry_point": "add_all", "cases": CASES,
    "files": {"solution.py": "def add_all(xs): ...\n", "test_visible.py": VISIBLE},
}  # fmt: skip
SUITE = {
    "key": "adds", "prompt": "Add all.", "files": PLAIN["files"], "artifacts": ["solution.py"],
    "hidden": {"kind": "suite", "suite": {"framework": "pytest", "files": {"test_hidden.py": HIDDEN}}},
}  # fmt: skip
CALLS = "from solution import *\n" + "\n".join(
    f"assert add_all([{i}, {10 * i + 3}]) == {11 * i + 3}" for i in range(1, 9)
)
TABLE = {
    **SUITE, "hidden": {"kind": "suite", "suite": {"framework": "script", "files": {"check.py": CALLS}}},
}  # fmt: skip
"""a script that only calls and compares, which is graded in one jail"""
STATE = {
    "key": "total", "prompt": "Write the total.",
    "hidden": {"kind": "state", "state": [{"kind": "json", "path": "out.json", "expected": {"total": 14}}]},
}  # fmt: skip
ROWS = {"cases": PLAIN, "suite": SUITE, "table": TABLE}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (work / "test_visible.py").write_text(VISIBLE)
    return work


def graded(
    capsys: pytest.CaptureFixture[str], folder: Path, row: dict[str, Any], *more: str
) -> dict[str, Any]:
    """What the command prints about a folder."""
    task = folder.parent / "task.jsonl"
    task.write_text(json.dumps(row))
    get_command(cli).main(
        ["grade", "--task", str(task), "--workspace", str(folder), "--json", *more], standalone_mode=False
    )
    verdict: dict[str, Any] = json.loads(capsys.readouterr().out)
    return verdict


def _check(hack: Hack, verdict: dict[str, Any]) -> None:
    assert verdict["reward"] == 0.0
    if hack.told:
        assert hack.told in {found["kind"] for found in verdict["tampering"]}


@pytest.mark.some(4)
@pytest.mark.parametrize("number", LISTED, ids=lambda n: f"{n}-{LISTED[n].name.replace(' ', '-')}")
def test_a_listed_hack_earns_nothing_from_cases(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LISTED[number].lay_down(folder)
    _check(LISTED[number], graded(capsys, folder, PLAIN))


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "number",
    [n for n in LISTED if not LISTED[n].slow],
    ids=lambda n: f"{n}-{LISTED[n].name.replace(' ', '-')}",
)
def test_a_listed_hack_earns_nothing_from_a_suite(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LISTED[number].lay_down(folder)
    assert graded(capsys, folder, SUITE)["reward"] == 0.0


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "number",
    [n for n in LISTED if not LISTED[n].slow],
    ids=lambda n: f"{n}-{LISTED[n].name.replace(' ', '-')}",
)
def test_a_listed_hack_earns_nothing_from_a_table(
    number: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LISTED[number].lay_down(folder)
    _check(LISTED[number], graded(capsys, folder, TABLE))


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in LISTED if LISTED[n].slow], ids=str)
@pytest.mark.parametrize("kind", ["suite", "table"])
def test_a_listed_hack_that_waits_earns_nothing_from_a_suite(
    kind: str, number: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LISTED[number].lay_down(folder)
    assert graded(capsys, folder, ROWS[kind])["reward"] == 0.0


@pytest.mark.some(4)
@pytest.mark.parametrize("hack", OWN, ids=lambda hack: hack.name.replace(" ", "-"))
@pytest.mark.parametrize("kind", ROWS)
def test_a_hack_of_our_own_earns_nothing(
    kind: str, hack: Hack, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hack.lay_down(folder)
    _check(hack, graded(capsys, folder, ROWS[kind]))


@pytest.mark.some(3)
@pytest.mark.parametrize("name", FAIR, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("kind", ROWS)
def test_a_right_solution_of_unusual_make_earns_one(
    kind: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "solution.py").write_text(FAIR[name], encoding="utf-8")
    verdict = graded(capsys, folder, ROWS[kind])
    assert (verdict["reward"], verdict["tampering"]) == (1.0, []), verdict


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "left",
    [
        b'{"total": 0, "total": 14}', b'{"total": 14.0}', b'{"total": "14"}', b'{"total": [14]}', b"14",
        b'{"total": 14} {"total": 14}', b'{"total": 14, "also": 15}', b'{"total": NaN}', b"", b"\x00",
        '{"total": 14}'.encode("utf-16"), b"[" * 100_000, b'{"total": 1e999}',
    ],
    ids=lambda left: repr(left[:24]),
)  # fmt: skip
def test_a_state_that_is_nearly_right_earns_nothing(
    left: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.json").write_bytes(left)
    assert graded(capsys, folder, STATE)["reward"] == 0.0


def test_a_state_behind_a_link_earns_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "elsewhere.json").write_text('{"total": 14}')
    (folder / "out.json").symlink_to(folder.parent / "elsewhere.json")
    verdict = graded(capsys, folder, STATE)
    assert (verdict["reward"], [found["kind"] for found in verdict["tampering"]]) == (0.0, ["link"])
    (folder / "out.json").unlink()
    (folder / "out.json").write_text('{ "total":\r\n14 }')
    assert graded(capsys, folder, STATE)["reward"] == 1.0


def test_every_listed_number_is_here_and_their_count_in_the_docs() -> None:
    assert list(LISTED) == list(range(1, 54))
    assert len(OWN) >= 20
    assert f"{len(LISTED)} listed hacks" in (Path(__file__).parents[2] / "docs/security.md").read_text()


@pytest.mark.parametrize("kind", ROWS)
def test_the_right_solution_earns_one_beside_what_was_planted(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Hack("", RIGHT, planted={"conftest.py": "raise SystemExit\n", "json.py": "raise SystemExit\n"}).lay_down(
        folder
    )
    verdict = graded(capsys, folder, ROWS[kind])
    assert verdict["reward"] == 1.0
    assert {found["kind"] for found in verdict["tampering"]} == {"configuration", "shadowing"}
    assert graded(capsys, folder, ROWS[kind], "--grader", "gate")["reward"] == 0.0


# --------------------------------------------------------------------------------------- the folder


def test_what_was_hashed_is_what_is_graded_while_the_file_changes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hashes = {content_hash([["solution.py", content_hash(text.encode())]]): text for text in (RIGHT, WRONG)}
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            for text in (RIGHT, WRONG):
                (folder / "new").write_text(text)
                os.replace(folder / "new", folder / "solution.py")

    (folder / "solution.py").write_text(WRONG)
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        verdict = graded(capsys, folder, PLAIN)
    finally:
        ended.set()
        thread.join()
    assert verdict["reward"] == 0.0
    assert "changed" in {found["kind"] for found in verdict["tampering"]}
    if verdict["graded_hash"] in hashes:  # else it was left out: it changed while it was read
        assert verdict["components"]["tests"] == float(hashes[verdict["graded_hash"]] == RIGHT)


def test_a_folder_that_leads_out_is_reported_and_never_followed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = folder.parent / "secret"
    secret.mkdir()
    (secret / "conftest.py").write_text("x")
    (folder / "solution.py").write_text(RIGHT)
    (folder / "out").symlink_to(secret)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    verdict = graded(capsys, folder, PLAIN)
    assert verdict["reward"] == 1.0
    assert [found["kind"] for found in verdict["tampering"]] == ["link", "link", "special_file"]


def test_a_solution_beneath_a_linked_folder_is_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "solution.py").write_text(RIGHT)
    (folder / "pkg").symlink_to(folder.parent / "elsewhere")
    verdict = graded(capsys, folder, {**PLAIN, "target": "pkg/solution.py", "files": {}})
    assert (verdict["reward"], verdict["failure_kind"]) == (0.0, "no_artifact")


def test_a_huge_file_is_reported_and_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "solution.py").write_text(RIGHT)
    with (folder / "huge").open("wb") as file:
        file.truncate(1 << 40)
    verdict = graded(capsys, folder, PLAIN)
    assert (verdict["reward"], [found["kind"] for found in verdict["tampering"]]) == (1.0, ["too_large"])


def test_an_unreadable_solution_earns_nothing_and_root_reads_everything(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "solution.py").write_text(RIGHT)
    (folder / "solution.py").chmod(0)
    verdict = graded(capsys, folder, PLAIN)
    readable = os.access(folder / "solution.py", os.R_OK)
    assert verdict["reward"] == float(readable)
    assert [found["kind"] for found in verdict["tampering"]] == ([] if readable else ["unreadable"])
