"""The question at the end of a run, on a real terminal: what is answered is applied, and kept as feedback."""

from __future__ import annotations

import os
import pty
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_cli import EDIT, Endpoint, argv, environment

from nano_shared.logged_run import edited_workspace
from nano_shared.store import LogStore

SECONDS = 120
"""for one answer of the program, however busy the machine is"""
ASKED = "decide later"
END_OF_INPUT = b"\x04"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.py").write_text("one\n")
    (folder / "mine.txt").write_text("mine\n")
    return folder


@pytest.fixture
def server() -> Iterator[Endpoint]:
    import threading

    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.leave.set()
    server.shutdown()
    thread.join()
    server.server_close()


class Terminal:
    """A program on a pseudo-terminal: what it wrote so far, and what is typed."""

    def __init__(self, arguments: list[str], environment: dict[str, str], cwd: Path) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            arguments, stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=cwd, close_fds=True
        )
        os.close(slave)
        self.text = ""

    def read_until(self, word: str, times: int = 1) -> None:
        while self.text.count(word) < times:
            assert self._read(), f"it ended before {word!r}: {self.text}"

    def type(self, line: str) -> None:
        self.press(line.encode() + b"\n")

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(SECONDS)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], SECONDS)
        assert ready, f"nothing came for {SECONDS} s after: {self.text}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


Run = Callable[..., Terminal]


@pytest.fixture
def run(server: Endpoint, project: Path, tmp_path: Path) -> Run:
    def start(*flags: str, editor: str = "false") -> Terminal:
        server.script = list(EDIT)
        variables = {**environment(tmp_path / "home"), "EDITOR": editor, "TERM": "dumb", "COLUMNS": "200"}
        variables.pop("VISUAL", None)
        arguments = argv("nano-coder", "run", "Say two.", "-C", str(project), *server.flags, *flags)
        return Terminal(arguments, variables, tmp_path)

    return start


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], LogStore]:
    return lambda: LogStore.open(tmp_path / "home" / "log.db", create=False)


def editor(folder: Path, script: str) -> str:
    path = folder / "editor.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "kinds", "text"), [("a", ["accept"], "two\n"), ("r", ["reject"], "one\n"), ("", [], "one\n")]
)
def test_accept_applies_and_reject_does_not_and_both_are_remembered(
    run: Run, project: Path, log: Callable[[], LogStore], answer: str, kinds: list[str], text: str
) -> None:
    terminal = run()
    terminal.read_until(ASKED)
    terminal.type(answer)
    assert terminal.end() == 0
    assert (project / "a.py").read_text() == text
    assert ("not applied" in terminal.text) == (text == "one\n")
    with log() as store:
        assert [row.kind for row in store.feedback(store.resolve("last"))] == kinds


def test_an_edit_is_applied_and_its_diff_is_kept_and_can_be_undone(
    run: Run, project: Path, tmp_path: Path, log: Callable[[], LogStore]
) -> None:
    # it leaves a backup beside the file, as editors do
    terminal = run(editor=editor(tmp_path, 'for f; do cp "$f" "$f~"; echo three > "$f"; done'))
    terminal.read_until(ASKED)
    terminal.type("maybe")
    terminal.read_until(ASKED, times=2)
    terminal.type("e")
    assert terminal.end() == 0
    assert {p.name: p.read_text() for p in project.iterdir()} == {"a.py": "three\n", "mine.txt": "mine\n"}
    with log() as store:
        name = store.resolve("last")
        (row,) = store.feedback(name)
    assert row.kind == "edit"
    assert "-two\n+three\n" in (row.text or "")
    assert edited_workspace(row)
    undone = subprocess.run(
        argv("nano-coder", "undo", name, "-C", str(project)), env=environment(tmp_path / "home"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (undone.returncode, undone.stdout) == (0, "a.py\n")
    assert (project / "a.py").read_text() == "one\n"


@pytest.mark.slow
def test_an_editor_that_fails_or_changes_nothing_leaves_the_question_open(
    run: Run, project: Path, log: Callable[[], LogStore]
) -> None:
    terminal = run(editor="true")
    terminal.read_until(ASKED)
    terminal.type("e")
    terminal.read_until("the editor changed nothing")
    terminal.read_until(ASKED, times=2)
    terminal.type("r")
    assert terminal.end() == 0
    assert (project / "a.py").read_text() == "one\n"
    with log() as store:
        assert [row.kind for row in store.feedback(store.resolve("last"))] == ["reject"]


def test_whoever_leaves_the_question_is_told_how_the_changes_are_had_later(
    run: Run, project: Path, log: Callable[[], LogStore]
) -> None:
    terminal = run()
    terminal.read_until(ASKED)
    terminal.press(END_OF_INPUT)
    assert terminal.end() == 130
    with log() as store:
        name = store.resolve("last")
        assert list(store.all_feedback()) == []
    assert f"nano-coder apply {name}" in terminal.text
    assert (project / "a.py").read_text() == "one\n"


@pytest.mark.slow
def test_with_apply_nobody_is_asked_and_nothing_is_said(
    run: Run, project: Path, log: Callable[[], LogStore]
) -> None:
    terminal = run("--apply")
    assert terminal.end() == 0
    assert ASKED not in terminal.text
    assert (project / "a.py").read_text() == "two\n"
    with log() as store:
        assert list(store.all_feedback()) == []
