"""Notes, pages and searches as tools of a run, and that forks answer from the log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task
from typer.testing import CliRunner, Result

from nano_coder.agent.profiles import COMPACT_1, with_tools
from nano_coder.cli import cli
from nano_coder.config import SearchSettings
from nano_coder.run.execution import Project, RunSettings, Runtime, run_task
from nano_coder.run.fork import fork_run
from nano_coder.sandbox.namespaces import NsSandbox
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.tool import ToolContext, ToolFailure
from nano_logs.redact.redactor import Redactor
from nano_shared.types import Limits, Trajectory
from nano_web.tools import fetch_url, web_search

LIMITS = Limits(memory_mb=512, tool_seconds=60)
PAGE = b"""<html><head><title>t</title><script>evil()</script></head><body><h1>Fares</h1>
<p>To Bonn: <b>12 EUR</b></p><p>\x1b[2Jsee <a href="http://x.example/y">more</a></p></body></html>"""


class _Site(BaseHTTPRequestHandler):
    """Pages, and a search engine that counts its questions."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body, kind = PAGE, "text/html; charset=utf-8"
        if self.path.startswith("/search"):
            rows = [{"title": "A", "url": "http://a", "content": f"answer {len(self.asked)}"}, {"title": "B"}]
            body, kind = json.dumps({"web": {"results": rows}}).encode(), "application/json"
        if self.path == "/picture":
            kind = "image/png"
        self.send_response(302 if self.path == "/away" else 200)
        if self.path == "/away":
            self.send_header("Location", "http://elsewhere.example/")
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    _Site.asked.clear()
    for ports in ("_PLAIN_PORTS", "_TUNNEL_PORTS"):
        monkeypatch.setattr(f"nano_coder.sandbox.proxy.{ports}", frozenset({server.server_port}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def context(port: int) -> Iterator[ToolContext]:
    """A jail that reaches site.example, which is our own server."""
    sandbox = open_sandbox()
    assert isinstance(sandbox, NsSandbox)
    allowed = frozenset({"site.example"})
    with closing(sandbox.open_connected(None, LIMITS, allowed, lambda *_: ["127.0.0.1"])) as jail:
        yield ToolContext(jail=jail, limits=LIMITS, sandbox=sandbox, network="allow=site.example")


# ------------------------------------------------------------------------------------------ pages


def test_a_page_is_read_as_text(context: ToolContext, port: int) -> None:
    result = fetch_url(context, {"url": f"http://site.example:{port}/"})
    assert result.ok
    assert result.text == "Fares\nTo Bonn: 12 EUR\nsee [http://x.example/y] more"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("site.example:{}/picture", "is image/png"),
        ("elsewhere.example:{}/", "403"),
        ("site.example:{}/away", "403"),
    ],
)
def test_what_is_no_text_or_not_allowed(context: ToolContext, port: int, path: str, said: str) -> None:
    result = fetch_url(context, {"url": f"http://{path.format(port)}"})
    assert not result.ok
    assert said in result.text
    assert "(allowed: site.example)" in result.text


def test_nothing_is_fetched_without_consent(context: ToolContext) -> None:
    with pytest.raises(ToolFailure, match="--net allow=HOST"):
        fetch_url(replace(context, network="none"), {"url": "http://site.example/"})
    with pytest.raises(ToolFailure, match="no address"):
        fetch_url(context, {"url": "file:///etc/passwd"})


# ------------------------------------------------------------------------------------------ search


@pytest.mark.slow
def test_an_engine_is_asked(context: ToolContext, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{port}/search?q={{query}}"
    settings = SearchSettings(engine=url, results="web.results", token_env_var="NO_SUCH_KEY")
    asking = replace(context, search=settings)
    with pytest.raises(ToolFailure, match="NO_SUCH_KEY"):
        web_search(asking, {"query": "x"})
    monkeypatch.setenv("NO_SUCH_KEY", "k")
    assert "A\nhttp://a\nanswer 1" in web_search(asking, {"query": "fares to Bonn & back"}).text
    assert _Site.asked == ["/search?q=fares%20to%20Bonn%20%26%20back"]
    with pytest.raises(ToolFailure, match="something else than results"):
        web_search(replace(context, search=SearchSettings(engine=url)), {"query": "x"})
    with pytest.raises(ToolFailure, match="failed"):
        web_search(
            replace(context, search=SearchSettings(engine="http://127.0.0.1:9/{query}")), {"query": "x"}
        )


@pytest.mark.parametrize("where", ["workspace", "folder"])
def test_documents_are_searched(context: ToolContext, tmp_path: Path, where: str) -> None:
    documents = {
        "fares.md": "# Fares\n\nA ticket to Bonn costs 12 EUR.\n",
        "deep/dogs.txt": "Dogs travel free.\n" * 300 + "\nExcept on Sundays.\n",
        "picture.png": "Bonn",
    }
    for name, text in documents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        context.jail.write(f"library/{name}", text.encode())
    settings = SearchSettings(documents=str(tmp_path)) if where == "folder" else None
    asking = replace(context, search=settings)
    place = "library/" if where == "workspace" else ""
    assert web_search(asking, {"query": "Bonn ticket"}).text.startswith(f"Fares\n{place}fares.md:1\n# Fares")
    assert f"{place}deep/dogs.txt:" in web_search(asking, {"query": "sundays"}).text
    assert web_search(asking, {"query": "xylophone"}).text == "nothing was found"


def test_where_there_is_nothing_to_search(context: ToolContext, tmp_path: Path) -> None:
    with pytest.raises(ToolFailure, match="no folder library of documents here; the user can set search"):
        web_search(context, {"query": "x"})
    with pytest.raises(ToolFailure, match="no such directory"):
        web_search(replace(context, search=SearchSettings(documents=str(tmp_path / "none"))), {"query": "x"})
    with pytest.raises(ToolFailure, match="empty"):
        web_search(context, {"query": " "})


# ------------------------------------------------------------------------------------------- runs


def logged(tmp_path: Path, port: int, *texts: str) -> tuple[Trajectory, Runtime]:
    profile = with_tools(COMPACT_1, ["remember", "recall", "web_search"])
    runtime = a_runtime(tmp_path, [*texts, SUBMIT], profile=profile)
    runtime = replace(
        runtime,
        project=Project(notes=runtime.store.notes("/p", Redactor().scrub)),
        settings=RunSettings(
            search=SearchSettings(engine=f"http://127.0.0.1:{port}/search?q={{query}}", results="web.results")
        ),
    )
    return run_task(a_task(limits=LIMITS), runtime, seed=1), runtime


def scripted(runtime: Runtime, tmp_path: Path, *texts: str) -> Runtime:
    return replace(runtime, policy=a_runtime(tmp_path, [*texts, SUBMIT]).policy)


def texts_of(run: Trajectory) -> list[str]:
    return [turn.observations[0].text for turn in run.turns]


def test_a_later_run_recalls_what_an_earlier_one_remembered(tmp_path: Path, port: int) -> None:
    run, runtime = logged(tmp_path, port, "@remember\nThe tests run with make check.")
    assert texts_of(run)[0] == "kept as note 1"
    later = run_task(a_task(), scripted(runtime, tmp_path, '@recall query="run the tests"'))
    assert texts_of(later)[0] == "[1] The tests run with make check.\n"
    assert runtime.project.notes is not None
    (note,) = runtime.project.notes.all()
    assert (note.run_id, note.turn) == (run.id, 0)


def test_a_run_of_no_project_remembers_nothing(tmp_path: Path, port: int) -> None:
    _, runtime = logged(tmp_path, port)
    run = run_task(a_task(), replace(scripted(runtime, tmp_path, "@remember\nx"), project=Project()))
    assert "belongs to no project" in texts_of(run)[0]


def test_a_fork_sees_the_world_of_its_parent(tmp_path: Path, port: int) -> None:
    run, runtime = logged(tmp_path, port, "@web_search query=x", "@web_search query=x", "@web_search query=y")
    before = texts_of(run)
    assert "answer 2" in before[1]
    script = ["@web_search query=x", "@web_search query=y", "@web_search query=x"]
    (fork,) = fork_run(run, scripted(runtime, tmp_path, *script), at=1, n=1, seed=0)
    # the equal calls have the parent's answers, in their order; the third is one call more than it made
    assert texts_of(fork)[:3] == before[:3]
    assert "answer 4" in texts_of(fork)[3]


def test_a_fork_keeps_its_notes_to_itself(tmp_path: Path, port: int) -> None:
    run, runtime = logged(tmp_path, port, "@calculate expression=1")
    script = ["@remember\nforked fact", "@recall query=forked"]
    (fork,) = fork_run(run, scripted(runtime, tmp_path, *script), at=1, n=1, seed=0)
    assert texts_of(fork)[2] == "[1] forked fact\n"
    later = run_task(a_task(), scripted(runtime, tmp_path, "@recall query=forked"))
    assert texts_of(later)[0] == "no notes hold any of these words"


# --------------------------------------------------------------------------------------- commands


def nano(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_memory_is_listed_edited_and_forgotten(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = f"{tmp_path}/log.db"
    _, runtime = logged(tmp_path, port)
    notes = runtime.store.notes(str(tmp_path), Redactor().scrub)
    notes.remember("the port is 80", run_id="r", turn=0)
    notes.remember("a second", run_id="r", turn=1)
    assert "the port is 80" in nano("memory", "list", "port", "--log", log).stdout
    assert [row["id"] for row in json.loads(nano("memory", "list", "--json", "--log", log).stdout)] == [2, 1]
    assert nano("memory", "edit", "1", "the port is 81", "--log", log).exit_code == 0
    monkeypatch.setenv("VISUAL", "sed -i s/81/82/")
    assert "port is 82" in nano("memory", "edit", "1", "--log", log).stdout
    assert "1 note forgotten" in nano("memory", "forget", "1", "--log", log).stdout
    assert "no note 1" in str(nano("memory", "forget", "1", "--log", log).exception)
    assert nano("memory", "forget", "--all", "--log", log).stdout == "1 note forgotten\n"
    assert nano("memory", "list", "--log", log).stderr == "no notes\n"
