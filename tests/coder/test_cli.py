"""The command line: results on stdout, one sentence for each error, and the agreed exit codes."""

from __future__ import annotations

import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import forked
import pytest
from executions import a_runtime, a_task, act

from nano_coder.agent.profiles import HERMES_1
from nano_coder.run.execution import grade_run, run_task
from nano_rl.tasks.task_file import read_tasks, write_tasks
from nano_shared import __version__
from nano_shared.store import LogStore
from nano_shared.types import Task

Cli = Callable[..., subprocess.CompletedProcess[str]]
CHECK = "grep -q two a.py"


class Endpoint(ThreadingHTTPServer):
    """A chat completions server that plays a script; a number in it is a status, None never answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.script: list[str | int | None] = []
        self.before_last: Callable[[], object] = lambda: None
        self.key: str | None = None
        """that a request must bring; None asks for none"""
        self.finish = "stop"
        self.bodies: list[dict[str, Any]] = []
        self.waiting, self.leave = threading.Event(), threading.Event()

    @property
    def flags(self) -> tuple[str, ...]:
        url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        return ("--model", "openai:m", "--set", "profile=api-1", "--base-url", url)


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        wrong = server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}"
        item = 401 if wrong else server.script.pop(0)
        if not server.script:
            server.before_last()
        if item is None:
            server.waiting.set()
            server.leave.wait()
            return
        choice = {"message": {"content": item}, "finish_reason": server.finish}
        body = json.dumps({"choices": [choice]} if isinstance(item, str) else {}).encode()
        self.send_response(item if isinstance(item, int) else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.leave.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.py").write_text("one\n")
    (folder / "untracked.txt").write_text("mine\n")
    return folder


def environment(home: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("NANO_")}
    path = os.pathsep.join(p for p in sys.path if p)
    return {**kept, "NANO_HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "PYTHONPATH": path}


def argv(program: str, *arguments: str) -> list[str]:
    module = program.replace("-", "_")
    return [sys.executable, "-c", f"from {module}.cli import main; main()", *arguments]


@pytest.fixture
def cli(home: Path, tmp_path: Path) -> Cli:
    def call(
        *arguments: str,
        program: str = "nano-coder",
        input: str = "",
        cwd: Path = tmp_path,
        file_size: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        given = {"given": input, "file_size": file_size}
        return forked.run(program, *arguments, env=environment(home), cwd=cwd, **given)

    return call


@pytest.fixture
def fresh(home: Path, tmp_path: Path) -> Cli:
    """`cli` in a fresh interpreter, with options of subprocess.run."""

    def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv("nano-coder", *arguments), capture_output=True, text=True, check=False,
            env=environment(home), cwd=tmp_path, **options,
        )  # fmt: skip

    return call


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on stderr, nothing on stdout."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == [], line
    assert (done.returncode, done.stdout) == (code, "")


def hermes(*calls: tuple[str, dict[str, Any]]) -> list[str | int | None]:
    return [act(name, HERMES_1, **arguments) for name, arguments in calls]


EDIT = hermes(("edit_file", {"path": "a.py", "line": 1, "new": "two"}), ("submit", {"answer": "ok"}))


# -------------------------------------------------------------------------------------- what works


def test_help_lists_the_commands(cli: Cli) -> None:
    for program, command in (("nano-coder", "apply"), ("nano-rl", "train")):
        done = cli("--help", program=program)
        assert (done.returncode, done.stderr) == (0, "")
        assert command in done.stdout


def test_a_run_prints_one_object_and_is_applied_later(
    cli: Cli, endpoint: Endpoint, project: Path, home: Path
) -> None:
    endpoint.script = list(EDIT)
    done = cli("run", "-", "-C", str(project), "--check", CHECK, "--json", *endpoint.flags, input="Say two.")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["stop"], result["answer"], result["applied"]) == ("finished", "ok", False)
    assert result["verdict"]["reward"] == 1
    assert (project / "a.py").read_text() == "one\n"
    run = result["run"]

    shown = cli("diff", run)
    assert (shown.stdout, shown.returncode) == (result["diff"], 0)
    listed = json.loads(cli("log", "list", "--json").stdout)
    assert [(r["id"], r["prompt"], r["reward"]) for r in listed] == [(run, "Say two.", 1.0)]
    assert run in cli("log", "list").stdout
    assert json.loads(cli("log", "show", run[:12], "--json").stdout)["task"]["check"] == CHECK
    told = cli("log", "show", "last", "-C", str(project))
    assert "Say two." in told.stdout
    assert "edited a.py" in told.stdout
    assert cli("log", "path").stdout == f"{home / 'log.db'}\n"
    verified = cli("log", "verify", run, "--json")
    assert verified.returncode == 1
    assert [f["kind"] for f in json.loads(verified.stdout)["findings"] if f["blocks"]] == ["text-only"]
    assert "no: text-only" in cli("log", "verify", run).stdout

    (project / "untracked.txt").write_text("changed since\n")
    applied = cli("apply", run, "-C", str(project))
    assert (applied.stdout, applied.returncode) == ("a.py\n", 0)
    assert {p.name: p.read_text() for p in project.iterdir()} == {
        "a.py": "two\n", "untracked.txt": "changed since\n",
    }  # fmt: skip
    assert "nothing to apply" in cli("apply", run, "-C", str(project)).stderr
    (project / "a.py").write_text("three\n")
    refused(cli("apply", run, "-C", str(project)), 2, "'a.py'", "nothing was touched")
    assert (project / "a.py").read_text() == "three\n"
    refused(cli("resume", run), 2, f"run {run} ended (finished)")


def test_a_check_that_is_not_there_is_said_to_be_missing(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    endpoint.script = list(EDIT)
    done = cli("run", "Say two.", "-C", str(project), "--check", "no-such-check", "--apply", *endpoint.flags)
    assert done.returncode == 1
    assert "check: could not be run: no-such-check: not found; --python names" in done.stdout
    assert "step 2" in done.stderr
    assert "-one\n+two\n" in done.stdout
    assert (project / "a.py").read_text() == "two\n"


def test_a_failed_check_shows_what_it_printed(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    endpoint.script = list(EDIT)
    check = "echo seen; echo '\033[31mbad' >&2; exit 3"
    done = cli("run", "Say two.", "-C", str(project), "--check", check, *endpoint.flags)
    for told in (done.stdout, cli("log", "show", "last", cwd=project).stdout):
        assert "check: failed (exit code 3) on the original tests plus the diff" in told
        assert "│ seen\n│ bad\n" in told
    shown = json.loads(cli("log", "show", "last", "--json", cwd=project).stdout)["verdict"]["check_run"]
    assert (shown["exit_code"], shown["output"]) == (3, "seen\nbad")


def test_changes_are_applied_and_taken_back_where_the_run_was_made(
    cli: Cli, endpoint: Endpoint, project: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").write_text("one\n")
    endpoint.script = list(EDIT)
    done = cli("run", "Say two.", "-C", "project", "--json", *endpoint.flags)
    run = json.loads(done.stdout)["run"]
    shown = cli("diff", "last", "-C", str(project), cwd=other)
    assert shown.stderr == f"changes to {project}\n"
    for command in ("apply", "undo", "diff"):  # `last` is of the directory that one is in
        refused(
            cli(command, "last", cwd=other), 2, f"no run of yours in {other}", run, str(project), "by its id"
        )
    applied = cli("apply", run, cwd=other)
    assert (applied.stdout, applied.stderr) == ("a.py\n", f"applied to {project}\n")
    assert [(p / "a.py").read_text() for p in (project, other)] == ["two\n", "one\n"]
    undone = cli("undo", run, cwd=other)
    assert (undone.stdout, undone.stderr) == ("a.py\n", f"taken back in {project}\n")
    assert (project / "a.py").read_text() == "one\n"
    assert cli("apply", run, "-C", ".", cwd=other).stdout == "a.py\n"
    assert [(p / "a.py").read_text() for p in (project, other)] == ["one\n", "two\n"]
    project.rename(tmp_path / "moved")
    for command in ("apply", "undo"):
        refused(cli(command, run, cwd=other), 2, str(project), "no directory any more", "-C")


def test_a_run_that_names_no_directory_is_applied_to_a_named_one_alone(
    cli: Cli, project: Path, home: Path
) -> None:
    runtime = a_runtime(home, [act("shell", command="echo two > a.py"), act("submit")])
    with runtime.store:
        run = run_task(a_task(files={"a.py": "one\n"}), runtime)
    refused(
        cli("apply", "last", cwd=project), 2, f"your newest is {run.id} of no directory: name it by its id"
    )
    refused(cli("apply", run.id, cwd=project), 2, "names no directory", "-C")
    assert (project / "a.py").read_text() == "one\n"


@pytest.mark.parametrize(
    "json_flag", [(), pytest.param(("--json",), marks=pytest.mark.slow)], ids=["text", "json"]
)
@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("echo other > a.py", ["'a.py'", "nothing was touched"]),
        ("rm a.py; mkdir a.py", ["'a.py'", "nothing was touched"]),
        ("cd ..; mv project moved", ["no such directory"]),
    ],
    ids=["changed", "a folder in the way", "gone"],
)
def test_changes_that_cannot_be_applied_are_not_lost(
    cli: Cli, endpoint: Endpoint, project: Path, after: str, words: list[str], json_flag: tuple[str, ...]
) -> None:
    endpoint.script = list(EDIT)
    endpoint.before_last = lambda: subprocess.run(["sh", "-c", after], cwd=project, check=True)
    flags = ("--apply", "--check", CHECK, *json_flag, *endpoint.flags)
    done = cli("run", "Say two.", "-C", str(project), *flags)
    assert done.returncode == 2
    run = json.loads(cli("log", "list", "--json").stdout)[0]["id"]
    line = done.stderr.splitlines()[-1]
    assert [w for w in (*words, f"nano-coder apply {run} -C {project} tries again") if w not in line] == []
    if json_flag:
        result = json.loads(done.stdout)
        assert (result["run"], result["applied"], result["verdict"]["reward"]) == (run, False, 1)
    else:
        assert [word for word in ("+two", "check: passed", f"run: {run}") if word not in done.stdout] == []


@pytest.mark.as_user
def test_a_directory_that_cannot_be_written_is_named_with_the_file(
    cli: Cli, endpoint: Endpoint, project: Path
) -> None:
    endpoint.script = list(EDIT)
    project.chmod(0o555)
    done = cli("run", "Say two.", "-C", str(project), "--apply", *endpoint.flags)
    project.chmod(0o755)
    assert done.returncode == 2
    assert f"{project}: cannot change 'a.py': Permission denied" in done.stderr.splitlines()[-1]
    assert "+two" in done.stdout


def test_a_disk_that_is_full_names_the_file(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    endpoint.script = hermes(("shell", {"command": "head -c 300000 /dev/urandom > large"}), ("submit", {}))
    done = cli("run", "Fill.", "-C", str(project), *endpoint.flags)
    assert done.returncode == 0
    applied = cli("apply", "last", "-C", str(project), file_size=200_000)
    refused(applied, 2, str(project), "cannot change 'large': File too large")
    assert sorted(path.name for path in project.iterdir()) == ["a.py", "untracked.txt"]


def test_names_that_are_not_utf_8_are_names(cli: Cli, endpoint: Endpoint, tmp_path: Path) -> None:
    project = tmp_path / os.fsdecode(b"pro\xfe")
    project.mkdir()
    (project / os.fsdecode(b"n\xff.txt")).write_text("x\n")
    endpoint.script = hermes(("shell", {"command": "mv n* m$(printf '\\376'); ls"}), ("submit", {}))
    done = cli("run", "Rename.", "-C", str(project), "--apply", "--check", "ls m*", *endpoint.flags)
    assert (done.returncode, "│ m\\xfe\n" in done.stderr, "check: passed" in done.stdout) == (0, True, True)
    assert os.listdir(os.fsencode(project)) == [b"m\xfe"]
    assert "pro\\udcfe" in cli("undo", "last", cwd=project).stderr
    assert os.listdir(os.fsencode(project)) == [b"n\xff.txt"]
    shown = cli("log", "show", "last", "--json", "-C", str(project))
    assert json.loads(shown.stdout)["directory"] == str(project)


def test_nothing_is_folded_or_wrapped_in_a_file(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    endpoint.script = hermes(
        ("shell", {"command": "seq 100; head -c 500 /dev/zero | tr '\\0' x"}), ("submit", {})
    )
    done = cli("run", "Count.", "-C", str(project), *endpoint.flags)
    lines = done.stderr.splitlines()
    assert [f"│ {n}" in lines for n in (1, 50, 100)] == [True] * 3
    assert f"│ {'x' * 500}" in lines


def test_an_interrupted_run_can_be_resumed(cli: Cli, endpoint: Endpoint, project: Path, home: Path) -> None:
    endpoint.script = [EDIT[0], None]
    arguments = ("run", "Say two.", "-C", str(project), "--check", CHECK, "--json", *endpoint.flags)
    with subprocess.Popen(
        argv("nano-coder", *arguments), env=environment(home), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # whoever runs the tests in the background has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert endpoint.waiting.wait(120)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    result = json.loads(out)
    assert (result["stop"], result["turns"]) == ("interrupted", 1)
    endpoint.script = [EDIT[1]]
    resumed = cli("resume", "last", "-C", str(project), "--json", *endpoint.flags)
    assert resumed.returncode == 0
    assert (json.loads(resumed.stdout)["run"], json.loads(resumed.stdout)["diff"]) == (
        result["run"], result["diff"],
    )  # fmt: skip
    assert (project / "a.py").read_text() == "one\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [("cat; exit 3", 3), ("sleep 60", 124), ("kill -9 $$", 137), ("echo x", 0), ("no-such-program", 127)],
)
def test_exec_gives_the_programs_own_exit_code(cli: Cli, command: str, code: int) -> None:
    timeout = "1" if "sleep" in command else "60"
    done = cli("exec", "--timeout", timeout, "--", "sh", "-c", command, input="given")
    assert done.returncode == code
    assert done.stdout == {3: "given", 0: "x\n"}.get(code, "")


def test_exec_works_on_a_copy(cli: Cli, project: Path) -> None:
    done = cli("exec", "--workspace", str(project), "--", "sh", "-c", "echo x > a.py; cat untracked.txt")
    assert (done.stdout, done.returncode) == ("mine\n", 0)
    assert (project / "a.py").read_text() == "one\n"


def test_config_says_where_each_value_is_from(cli: Cli, project: Path) -> None:
    (project / "nano.toml").write_text("max_turns = 3\napi_key = 'secret'\n")
    done = cli("config", "show", "-C", str(project), "--json")
    values = json.loads(done.stdout)
    assert values["max_turns"] == {"value": 3, "source": "nano.toml"}
    assert values["api_key"] == {"value": None, "source": "default", "ignored": {"api_key": "(set)"}}
    assert values["sandbox"] == {"value": "ns", "source": "default"}
    told = cli("config", "show", "-C", str(project)).stdout
    assert "(nano.toml)" in told
    assert "secret" not in done.stdout + told


# --------------------------------------------------------------------------------- what is refused


def test_bad_input_is_one_sentence(cli: Cli, project: Path, home: Path) -> None:
    here = ("-C", str(project))
    refused(cli("run", "do it", "-C", "nowhere"), 2, "no such directory: nowhere", "-C")
    refused(cli("run", "do it", *here, "--model", "nosuch"), 2, "unknown model 'nosuch'")
    refused(cli("run", " ", *here), 2, "the task is empty")
    refused(cli("run", "-", *here, input="\n"), 2, "the task is empty")
    refused(cli("run", "do it", *here, "--model", "openai:x"), 3, "openai:x", "API key", "--base-url")
    refused(cli("run", "do it", *here, "--limit", "max_turns=0"), 2, "--limit max_turns=0: ")
    refused(
        cli("run", "do it", *here, "--limit", "max_turns=x"), 2, "--limit max_turns=x: ", "a valid integer"
    )
    refused(cli("run", *here), 2, "Missing argument 'TASK'", "run --help")
    refused(cli("fly"), 2, "No such command 'fly'")
    refused(cli("run", "do it", *here, "--python", "/no/python"), 2, "/no/python", "--python")
    refused(cli("exec", "--workspace", "nowhere", "--", "ls"), 2, "no such directory: nowhere")
    refused(cli("apply", "x", "-C", "nowhere"), 2, "no such directory: nowhere")


def test_links_in_a_circle_and_homes_of_nobody_lead_nowhere(cli: Cli, project: Path) -> None:
    for name in (".venv", "tool.py"):
        (project / name).symlink_to(name)
    unknown = "unknown model '~nobody-here/model'"
    refused(cli("run", "do it", "-C", str(project), "--model", "~nobody-here/model"), 2, unknown)
    refused(cli("tools", "-C", str(project), "--tool", f"{project}/tool.py:x"), 3, "no such file")
    refused(cli("log", "list", "--log", "~nobody-here/log.db"), 2, "there is no log at", "~nobody-here")


def test_a_task_that_is_no_text_is_refused(fresh: Cli, project: Path, tmp_path: Path) -> None:
    (tmp_path / "task").write_bytes(b"\xff")
    with (tmp_path / "task").open() as file:
        done = fresh("run", "-", "-C", str(project), stdin=file)
    refused(done, 2, "not UTF-8 text")


def test_a_log_without_the_run_is_named(cli: Cli, home: Path) -> None:
    refused(cli("diff", "abc"), 2, f"there is no log at {home / 'log.db'}")
    LogStore.open(home / "log.db").close()
    for command in (("diff",), ("apply",), ("resume",), ("log", "show"), ("log", "verify")):
        refused(cli(*command, "abc"), 2, "no run 'abc'")


def test_a_foreign_a_newer_and_no_database_are_refused(cli: Cli, project: Path, tmp_path: Path) -> None:
    foreign, newer, text = tmp_path / "foreign.db", tmp_path / "newer.db", tmp_path / "text.db"
    LogStore.open(newer).close()
    for path, statement in (
        (foreign, "CREATE TABLE songs (name)"), (newer, "UPDATE log_version SET version_num = '9999'"),
    ):  # fmt: skip
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()
    text.write_text("not a database, and longer than a header would be" * 10)
    for path, words in ((foreign, "some other program's"), (newer, "newer nano"), (text, "not an SQLite")):
        refused(cli("run", "x", "-C", str(project), "--log", str(path)), 2, str(path), words)


def test_a_corrupt_checkpoint_is_refused(cli: Cli, project: Path, home: Path) -> None:
    folder = home / "checkpoints" / "mine"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    refused(cli("run", "x", "-C", str(project), "--model", "mine"), 2, "mine", "manifest.json is corrupt")


def test_an_endpoint_that_refuses_ends_the_run(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    endpoint.script = [400]
    done = cli("run", "x", "-C", str(project), "--json", *endpoint.flags)
    assert (done.returncode, done.stderr) == (4, "")
    assert "answered 400" in json.loads(done.stdout)["stop_detail"]


@pytest.fixture(params=["OPENAI_*", "user config"])
def hosted(
    request: pytest.FixtureRequest, endpoint: Endpoint, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Endpoint:
    """An endpoint that wants a key, which is not on the command line."""
    endpoint.key, url = "s3cret", endpoint.flags[-1]
    if request.param == "OPENAI_*":
        monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
        monkeypatch.setenv("OPENAI_BASE_URL", url)
    else:
        monkeypatch.setenv("OPENAI_API_KEY", "another")  # ours come first
        monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
        written = home / "config" / "nano" / "config.toml"
        written.parent.mkdir(parents=True)
        written.write_text(f'base_url = "{url}"\napi_key = "s3cret"\n')
    return endpoint


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    task = {"key": "two", "prompt": "Say two.", "files": {"a.py": "one\n"}, "check": CHECK}
    file.write_text(json.dumps(task) + "\n")
    return file


@pytest.mark.slow
def test_the_key_and_the_url_of_an_endpoint_reach_every_command(
    cli: Cli, hosted: Endpoint, project: Path, tasks: Path
) -> None:
    hosted.script = list(EDIT)
    tools = ("--set", "profile=api-1")
    done = cli(
        "run", "Say two.", "-C", str(project), "--check", CHECK, "--json", "--model", "openai:m", *tools
    )
    assert done.returncode == 0, done.stderr
    hosted.script = [EDIT[1]]
    forked = cli("fork", json.loads(done.stdout)["run"], "--at", "1", "--n", "1", "--model", "openai:m")
    assert forked.returncode == 0, forked.stderr
    for command in (["rollout"], ["eval", "--json"]):
        hosted.script = list(EDIT)
        done = cli(*command, "--tasks", str(tasks), "--model", "openai:m", program="nano-rl")
        assert done.returncode == 0, done.stderr
        assert not hosted.script
    refused = cli("train", "--from-logs", "--name", "x", "--model", "openai:m", program="nano-rl")
    assert (refused.returncode, refused.stderr) == (
        2, "error: openai:m is trained where its weights are; name a local model with --model\n"
    )  # fmt: skip


def test_a_wrong_key_says_where_one_is_given(
    cli: Cli, endpoint: Endpoint, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    endpoint.key = "s3cret"
    done = cli("run", "x", "-C", str(project), "--json", *endpoint.flags)
    refused(done, 3, "NANO_API_KEY or OPENAI_API_KEY in the environment", "nano-coder resume")


@pytest.mark.slow
def test_a_limit_is_said_on_the_command_line_or_in_the_configuration(
    cli: Cli, endpoint: Endpoint, project: Path, home: Path, tasks: Path
) -> None:
    endpoint.script = list(EDIT)
    limits = ("--limit", "max_completion_tokens=7", "--limit", "max_turns=1")
    done = cli("run", "Say two.", "-C", str(project), *limits, *endpoint.flags)
    assert endpoint.bodies[-1]["max_completion_tokens"] == 7
    assert "stopped: max_turns (at 1; more with --limit max_turns=N)" in done.stdout
    # a task's own limits stand above the configuration, and a flag above them
    written = home / "config" / "nano" / "config.toml"
    written.parent.mkdir(parents=True)
    written.write_text("max_completion_tokens = 9\nmax_turns = 1\n")
    evaluate = ("eval", "--tasks", str(tasks), "--json", *endpoint.flags)
    for more, right in (((), 1), (("--limit", "max_turns=1"), 0)):
        endpoint.script = [*hermes(("read_file", {"path": "a.py"})), *EDIT]
        done = cli(*evaluate, *more, program="nano-rl")
        assert endpoint.bodies[-1]["max_completion_tokens"] == 9
        assert json.loads(done.stdout)["rows"][0]["successes"] == right, done.stderr
    wrong = cli(*evaluate, "--limit", "turns=3", program="nano-rl")
    assert wrong.returncode == 2
    assert "did you mean max_turns? The limits are max_turns, max_seconds" in wrong.stderr
    assert cli(*evaluate, "--limit", "max_turns=0", program="nano-rl").returncode == 2


def test_an_answer_that_is_cut_is_said_to_model_and_user(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    endpoint.script, endpoint.finish = list(EDIT), "length"
    done = cli("run", "Say two.", "-C", str(project), *endpoint.flags)
    assert "cut at 8192 tokens; more with --limit max_completion_tokens=N" in done.stderr
    assert "[your answer was cut at 8192 tokens, the most that one may have (max_completion_tokens)]" in str(
        endpoint.bodies[-1]
    )


@pytest.mark.slow
def test_an_endpoint_that_is_not_there_ends_the_run(cli: Cli, project: Path) -> None:
    nowhere = ("--model", "openai:m", "--base-url", "http://127.0.0.1:1/v1")
    done = cli("run", "x", "-C", str(project), *nowhere)
    assert done.returncode == 4
    assert "is the server running" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_named_with_the_way_out(
    cli: Cli, endpoint: Endpoint, project: Path, home: Path
) -> None:
    (project / "large").write_bytes(os.urandom(400_000))
    LogStore.open(home / "log.db").close()
    done = cli("run", "x", "-C", str(project), *endpoint.flags, file_size=300_000)
    refused(done, 2, "no space left while writing", "NANO_HOME")


@pytest.mark.as_user
def test_a_directory_that_cannot_be_read_is_named(cli: Cli, endpoint: Endpoint, project: Path) -> None:
    (project / "closed").mkdir(mode=0)  # in the project it is left out (test_unreadable_paths.py)
    refused(cli("run", "x", "-C", str(project / "closed/in"), *endpoint.flags), 2, "closed")


def test_a_failure_of_the_system_is_one_sentence(cli: Cli, project: Path, home: Path) -> None:
    (home / "checkpoints/latest").mkdir(parents=True)
    refused(cli("run", "x", "-C", str(project)), 2, "checkpoints/latest", "is a folder")


# ------------------------------------------------------------------- what a model wrote is only shown


def test_no_text_of_a_model_drives_the_terminal(cli: Cli, home: Path) -> None:
    bad = "\x1b]0;owned\x07 [/bold] [red] \\"
    write = act("shell", HERMES_1, command="printf '\\033[2J[/x]' > 'e\x1b[/vil]_test.py'; printf '\\033[2J'")
    runtime = a_runtime(home, [write, act("submit", HERMES_1, answer=bad)], profile=HERMES_1)
    run = run_task(a_task(prompt=bad), runtime).id
    for command in (("log", "list"), ("log", "show", run), ("log", "verify", run)):
        done = cli(*command)
        assert done.returncode == (command[1] == "verify")
        assert "\x1b" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
    assert "[red]" in cli("log", "show", run).stdout


def test_a_run_with_half_a_surrogate_pair_is_printed_as_json(cli: Cli, home: Path) -> None:
    path = '<tool_call>{"name": "read_file", "arguments": {"path": "\\ud800"}}</tool_call>'
    run = run_task(a_task(), a_runtime(home, [path, act("submit", HERMES_1)], profile=HERMES_1))
    done = cli("log", "show", run.id, "--json")
    assert json.loads(done.stdout)["turns"][0]["calls"][0]["arguments"] == {"path": "\ud800"}


# ------------------------------------------------------------------------------------------ nano-rl


def test_the_trainer_refuses_bad_input(cli: Cli, home: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [Task(key="a", prompt="b")])
    train = ("train", "--tasks", str(tasks), "--name")
    (tmp_path / "bad.jsonl").write_text('{"key": "a", "prompt": "b"}\n{"key": "a"}\n')
    done = cli("tasks", "list", str(tmp_path / "bad.jsonl"), program="nano-rl")
    refused(done, 2, f"{tmp_path / 'bad.jsonl'}:2: prompt: Field required")
    refused(cli("tasks", "list", "nowhere", program="nano-rl"), 2, "no such task file: nowhere")
    done = cli(*train, "x", "--group-size", "1", program="nano-rl")
    refused(done, 2, "group_size", "at least 2")
    (home / "checkpoints/mine").mkdir(parents=True)
    refused(cli(*train, "mine", program="nano-rl"), 2, "checkpoint mine exists already", "--name")
    refused(cli(*train, "a/b", program="nano-rl"), 2, "'a/b'")
    refused(cli("checkpoints", "show", "nosuch", program="nano-rl"), 2, "no checkpoint 'nosuch'")


def test_a_task_file_may_hold_any_text(tmp_path: Path) -> None:
    tasks = [Task(key="a", prompt="x\u2028y\x85z\nw"), Task(key="b", prompt="c")]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    assert read_tasks(tmp_path / "tasks.jsonl") == tasks


# ------------------------------------------------------------------------------------- on a terminal


@pytest.mark.slow
def test_long_outputs_are_folded_on_a_terminal_and_whole_on_request(
    cli: Cli, endpoint: Endpoint, project: Path, home: Path
) -> None:
    endpoint.script = hermes(("shell", {"command": "seq 100"}), ("submit", {}))
    assert cli("run", "Count.", "-C", str(project), *endpoint.flags).returncode == 0
    show = ("log", "show", "last", "-C", str(project))
    assert "│ 50\n" in cli(*show).stdout
    folded, whole = (on_a_terminal(home, *show, *flag) for flag in ((), ("-v",)))
    assert [f"│ {n}\n" in folded for n in (1, 50, 100)] == [True, False, True]
    assert "86 more lines; -v shows them" in folded
    assert [f"│ {n}\n" in whole for n in (1, 50, 100)] == [True] * 3


@pytest.mark.some(1)
@pytest.mark.parametrize("columns", [200, 80, 60, 40, 25])
def test_the_list_of_runs_keeps_its_reward_at_any_width(columns: int, home: Path) -> None:
    runtime = a_runtime(home, [act("submit")], policy_name="a-policy-with-a-long-name" * 3)
    with runtime.store:
        run = grade_run(run_task(a_task(prompt="fix " * 50, check="true"), runtime), runtime)
    heading, row = on_a_terminal(home, "log", "list", columns=columns).splitlines()
    assert heading.split()[-1] == "reward"
    assert (row.split()[0], row.split()[-1]) == (run.id, "1")


def on_a_terminal(home: Path, *arguments: str, columns: int = 100) -> str:
    """What a command prints on a terminal, without its colours."""
    ours, theirs = pty.openpty()
    variables = {**environment(home), "COLUMNS": str(columns), "TERM": "dumb"}
    ended = forked.begin("nano-coder", *arguments, env=variables, cwd=home, fds=[theirs] * 3)
    os.close(theirs)
    printed = b""
    try:
        while data := os.read(ours, 65536):
            printed += data
    except OSError:  # how Linux says that the other side of a terminal is closed
        os.close(ours)
    ended()
    return printed.decode().replace("\r\n", "\n")


# ------------------------------------------------------------------------------------------- the rest


def test_both_programs_tell_their_version(cli: Cli) -> None:
    for program in ("nano-coder", "nano-rl"):
        assert cli("--version", program=program).stdout == f"{program}, version {__version__}\n"


def test_exec_takes_an_interpreter(cli: Cli) -> None:
    done = cli("exec", "--python", "/usr/bin/python3", "--", "python", "-c", "import sys; print(sys.prefix)")
    assert (done.stdout, done.returncode) == ("/usr\n", 0)
    refused(cli("exec", "--python", "/no/python", "--", "ls"), 2, "/no/python")


def test_a_training_that_is_refused_leaves_no_folder(cli: Cli, home: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [a_task(check="true")])
    flags = ("--name", "mine", "--tasks", "tasks.jsonl", "--model", "nosuch")
    refused(cli("train", *flags, program="nano-rl"), 2, "nosuch")
    assert not (home / "trainings" / "mine").exists()


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_runs_that_all_failed_are_no_result(
    cli: Cli, endpoint: Endpoint, tmp_path: Path, command: str
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [a_task(key=str(n), check="true") for n in range(3)])
    asked = (command, "--tasks", "tasks.jsonl", *endpoint.flags)
    endpoint.script = [400] * 3
    done = cli(*asked, program="nano-rl")
    assert (done.returncode, done.stdout) == (4, "")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "none of 3 runs could be graded" in line
    assert "policy_error" in line
    assert "answered 400" in line
    endpoint.script = [400, *hermes(("submit", {}), ("submit", {}))]
    done = cli(*asked, program="nano-rl")
    assert done.returncode == 0
    assert "1 of 3 runs could not be graded" in done.stderr
    assert "100.0%" in done.stdout


EDITABLE = {
    "src by uv, hatch or poetry": ("shop.pth", "{project}/src\n", "src/shop"),
    "the root": ("_shop.pth", "{project}", "shop"),
    "setuptools": ("__editable___shop_finder.py", "MAPPING = {{'shop': '{project}/src/shop'}}\n", "src/shop"),
    "elsewhere": ("shop.pth", "{project}-other/src\n", None),
}


@pytest.mark.parametrize(("hook", "text", "found"), EDITABLE.values(), ids=EDITABLE)
def test_an_editable_install_is_imported_from_the_workspace(
    cli: Cli, hook: str, text: str, found: str | None
) -> None:
    # not below /tmp, which is the jail's own
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        project = Path(folder) / "project"
        package = project / (found or "src/shop")
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("print('it is', __file__)\n")
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", project / ".venv"], check=True)
        (site,) = project.glob(".venv/lib/python3*/site-packages")
        (site / hook).write_text(text.format(project=project))
        if hook.endswith(".py"):  # a finder of setuptools, in short
            start = f"import sys, {hook[:-3]} as found; sys.path.append(found.MAPPING['shop'][:-5])\n"
            (site / "a.pth").write_text(start)
        python = str(project / ".venv/bin/python")
        line = "mkdir sub && cd sub && python -c 'import shop'"
        done = cli("exec", "--python", python, "--workspace", str(project), "-c", line)
    if found is None:
        assert "No module named 'shop'" in done.stderr
    else:
        assert (done.stdout, done.stderr) == (f"it is /work/{found}/__init__.py\n".replace("./", ""), "")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "command", ["train --from-logs", "sft --from-logs", "dpo --from-logs", "reward-model --from-logs", "plan"]
)
@pytest.mark.parametrize(
    ("model", "said"),
    [("openai:m", "openai:m is trained where its weights are"), ("./nowhere", "unknown model './nowhere'")],
)
def test_a_model_that_cannot_be_trained_here_is_refused_before_torch_is_imported(
    command: str, model: str, said: str, tmp_path: Path
) -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    name = () if command == "plan" else ("--name", "x")
    argv = ["nano-rl", *command.split(), *name, "--model", model]
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.argv = {argv!r}\nfrom nano_rl.cli import main; main()"],
        cwd=tmp_path, env={**os.environ, "NANO_HOME": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
