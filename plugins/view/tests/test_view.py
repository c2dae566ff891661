"""The viewer's answers, its server and its file: whole, bounded, closed to strangers, and safe to open."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from typer.testing import CliRunner
from viewed import HOSTILE, LINE, hostile, log_of, run, seen, turn

from nano_apis.command import _pages
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.cli import cli
from nano_coder.serve.access import Access
from nano_coder.verify.trainable import RefusalCode
from nano_shared.errors import LogError, UsageError
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Trajectory, TurnTokens
from nano_view.answers import LogView, first_difference
from nano_view.app import view_app
from nano_view.page import answer_key, log_answers, render_page, run_answers
from nano_view.run_pages import RunPages
from nano_view.token_texts import Decoders, load_decoder, token_texts

REDACTED = 2**32 - 1


def trainable(name: str, **changed: Any) -> Trajectory:
    """A run that nothing keeps from training."""
    quiet = turn(text="hello").model_copy(update={"calls": (), "observations": ()})
    hashes = {"profile_hash": COMPACT_1.hash, "tools_hash": COMPACT_1.tools_hash}
    return run(name, quiet, **hashes, **changed)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a log: 250 runs of 25 tasks, and a few of every other kind."""
    many = [
        run(
            f"run-{n:03}",
            key=f"task-{n // 10:02}",
            at=float(n),
            reward=float(n % 2),
            policy=f"policy-{n % 3}",
        )
        for n in range(250)
    ]
    others = [
        run("partial", key="odd", at=300.0, reward=0.5),
        run("open", key="odd", at=301.0, stop=None, verdict=None),
        run("text", turn(text_only=True, text="where is Wally"), key="odd", at=302.0, reward=None),
        trainable("good", key="odd", at=303.0),
        hostile("hostile", at=304.0),
    ]
    folder = tmp_path_factory.mktemp("logged")
    log_of(folder / "log.db", [*many, *others]).close()
    return folder


@pytest.fixture
def store(logged: Path, tmp_path: Path) -> LogStore:
    shutil.copytree(logged, tmp_path, dirs_exist_ok=True)
    return LogStore.open(tmp_path / "log.db")


def every(view: LogView, name: str = "runs", **query: str) -> list[dict[str, Any]]:
    """The rows of all pages."""
    rows: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"next": None}
    while True:
        more = {"after": json.dumps(answer["next"])} if answer["next"] else {}
        answer = view.answers[name]({**query, **more})
        rows += answer["rows"]
        if answer["next"] is None:
            return rows


def test_pages_hold_every_run_once_newest_first(store: LogStore) -> None:
    rows = every(LogView(store))
    assert len(rows) == len({row["id"] for row in rows}) == 255
    assert [row["started"] for row in rows] == sorted((row["started"] for row in rows), reverse=True)
    assert len(LogView(store).runs({})["rows"]) == 100


def test_runs_of_one_moment_are_paged_by_their_ids(tmp_path: Path) -> None:
    store = log_of(tmp_path / "log.db", [run(f"r{n:03}") for n in range(230)])
    assert [row["id"] for row in every(LogView(store))] == [f"r{n:03}" for n in reversed(range(230))]


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"policy": "policy-1"}, {f"run-{n:03}" for n in range(1, 250, 3)}),
        ({"policy": "weights", "task": "odd"}, {"partial", "open", "text", "good"}),
        ({"task": "task-07"}, {f"run-{n:03}" for n in range(70, 80)}),
        ({"task": "%"}, set()),
        ({"reward": "partial"}, {"partial"}),
        ({"reward": "none"}, {"open", "text"}),
        ({"reward": "full", "task": "odd"}, {"good"}),
        ({"reward": "zero", "task": "task-00"}, {f"run-{n:03}" for n in range(0, 10, 2)}),
        ({"stop": "unfinished"}, {"open"}),
        ({"stop": "finished", "task": "odd"}, {"partial", "text", "good"}),
        ({"text": "Wally"}, {"text"}),
        ({"text": "漢字"}, {"hostile"}),
        ({"may": "train"}, {"good"}),
        ({"may": "text-only"}, {"text"}),
        ({"may": "unfinished"}, {"open"}),
    ],
)
def test_filters_select_the_runs(store: LogStore, query: dict[str, str], expected: set[str]) -> None:
    assert {row["id"] for row in every(LogView(store), **query)} == expected


def test_a_row_says_why_its_run_may_not_train(store: LogStore) -> None:
    answer = LogView(store).runs({})
    refused = {row["id"]: row["refused"] for row in answer["rows"]}
    assert refused["good"] == []
    assert RefusalCode.TEXT_ONLY in refused["text"]
    assert answer["codes"][RefusalCode.TEXT_ONLY] == RefusalCode.TEXT_ONLY.meaning


@pytest.mark.some(5)
@pytest.mark.parametrize(
    "query",
    [
        {"reward": "much"},
        {"after": "x"},
        {"after": "[1]"},
        {"after": '["a","b"]'},
        {"after": "[1e999,1]"},
        {"after": f"[{10**400},1]"},
        {"after": f"[1,{10**400}]"},
        {"after": "[NaN,1]"},
        {"after": "[" * 1500},
        {"after": r'[1,"\ud800"]'},
        {"may": "fly"},
    ],
)
def test_a_wrong_question_is_refused_with_a_sentence(store: LogStore, query: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        LogView(store).runs(query)


def test_groups_are_tasks_and_forks_of_one_step(tmp_path: Path) -> None:
    parent = run("parent", turn(0), turn(1), at=1.0, reward=0.25)
    forks = [run(f"fork-{n}", turn(0), turn(1, (5, n)), at=2.0 + n, reward=float(n), parent="parent",
                 parent_step=1) for n in range(2)]  # fmt: skip
    view = LogView(log_of(tmp_path / "log.db", [parent, run("other", at=0.5, reward=None), *forks]))
    first, second = every(view, "groups")
    assert (first["task"], first["parent"], first["parent_step"], first["runs"]) == ("task-0", "parent", 1, 2)
    assert (first["least"], first["mean"], first["best"]) == (0.0, 0.5, 1.0)
    assert (second["parent"], second["runs"], second["graded"], second["mean"]) == (None, 2, 1, 0.25)
    found = view.group({"id": first["of"]})
    assert {row["id"] for row in found["rows"]} == {"fork-0", "fork-1"}
    assert (found["best"], found["worst"]) == ("fork-1", "fork-0")
    assert {row["id"] for row in view.group({"id": "other"})["rows"]} == {"parent", "other"}


@pytest.mark.slow
def test_pages_of_groups_hold_every_group_once(tmp_path: Path) -> None:
    store = log_of(tmp_path / "log.db", [run(f"r{n}", key=f"k{n:03}", at=float(n // 7)) for n in range(230)])
    rows = every(LogView(store), "groups")
    assert len(rows) == len({row["task"] for row in rows}) == 230


def test_forks_are_a_tree_even_where_an_import_made_a_circle(tmp_path: Path) -> None:
    chain = [
        run("a"),
        run("b", parent="a", parent_step=1, at=1.0),
        run("c", parent="b", parent_step=1, at=2.0),
    ]
    orphan = run("d", parent="elsewhere", parent_step=1, at=3.0)
    circle = [run("e", parent="f", parent_step=1), run("f", parent="e", parent_step=1)]
    store = log_of(tmp_path / "log.db", [*chain, orphan, *circle])
    assert [row["id"] for row in RunPages(store).tree("c")] == ["a", "b", "c"]
    assert [row["id"] for row in RunPages(store).tree("a")] == ["a", "b", "c"]
    assert [row["id"] for row in RunPages(store).tree("d")] == ["d"]
    assert {row["id"] for row in RunPages(store).tree("e")} == {"e", "f"}


def test_a_long_run_and_long_texts_come_in_parts(tmp_path: Path) -> None:
    turns = [turn(n, observation=seen(LINE) if n == 0 else None) for n in range(70)]
    view = LogView(log_of(tmp_path / "log.db", [run("long", *turns, prompt="x" * 30_000)]))
    found = view.run({"id": "long"})
    assert (len(found["turns"]), found["turn_count"]) == (30, 70)
    assert found["prompt"]["length"] == 30_000
    text = found["turns"][0]["seen"][0]["text"]
    assert (len(text["text"]), text["length"]) == (10_000, len(LINE))
    whole, start = "", 0
    while start is not None:
        part = view.text({"id": "long", "part": text["part"], "from": str(start)})
        assert len(part["text"]) <= 500_000
        whole, start = whole + part["text"], part["next"]
    assert whole == LINE
    assert [t["index"] for t in view.run({"id": "long", "first": "60"})["turns"]] == list(range(60, 70))
    assert len(json.dumps(found)) < 200_000
    for wrong in ("turn:99:text", "turn:0:nothing", "file:none", "turn:x:text", "secrets"):
        with pytest.raises(UsageError, match="has no part"):
            view.text({"id": "long", "part": wrong})


def test_a_turn_of_many_tokens_shows_the_first_and_asks_for_the_rest(tmp_path: Path) -> None:
    view = LogView(log_of(tmp_path / "log.db", [run("r", turn(sampled=range(10_000)))]))
    tokens = view.run({"id": "r"})["turns"][0]["tokens"]
    assert (len(tokens["texts"]), tokens["more"]) == (3000, 7000)
    whole = view.turn({"id": "r", "turn": "0"})["tokens"]
    assert (len(whole["texts"]), whole["more"], len(whole["columns"]["logprob"])) == (10_000, 0, 10_000)


def test_tokens_carry_advantage_and_age_where_they_are_known(tmp_path: Path) -> None:
    runs = [run("a", turn(version=3), reward=1.0), run("b", turn(version=5), reward=0.0, at=1.0)]
    forked = run("c", turn(version=1), turn(1, version=5), parent="a", parent_step=1, at=0.5, reward=None)
    view = LogView(log_of(tmp_path / "log.db", [*runs, forked]))
    columns = view.run({"id": "a"})["turns"][0]["tokens"]["columns"]
    assert (columns["advantage"], columns["age"]) == (0.5, 2)
    inherited, own = view.run({"id": "c"})["turns"]
    assert inherited["inherited"] is True
    assert set(inherited["tokens"]["columns"]) == {"logprob"}
    assert set(own["tokens"]["columns"]) == {"logprob", "age"}


def test_first_differences() -> None:
    base = run("a", turn(0), turn(1, (8, 9, 10), context=(3,)))
    sampled = run("b", turn(0), turn(1, (8, 9, 11), context=(3,)))
    assert first_difference(base, sampled) == {"turn": 1, "what": "sampled", "at": 2, "shared": 5 + 1 + 2}
    read = run("c", turn(0), turn(1, (8,), context=(4,)))
    assert first_difference(base, read) == {"turn": 1, "what": "read", "at": 0, "shared": 5}
    assert first_difference(base, run("d", turn(0)))["what"] == "end"
    assert first_difference(base, base.model_copy())["what"] == "nothing"
    shorter = run("e", turn(0), turn(1, (8, 9), context=(3,)))
    assert first_difference(base, shorter) == {"turn": 1, "what": "sampled", "at": 2, "shared": 8}
    texts = [run(n, turn(text_only=True, text=text)) for n, text in (("f", "abc"), ("g", "abd"))]
    assert first_difference(*texts) == {"turn": 0, "what": "text", "at": 2, "shared": 2}


# ------------------------------------------------------------------------------------------ tokens


@pytest.fixture
def tokenizer(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tokenizer that lies where a training keeps it, beside a damaged one and one of another model."""
    from tokenizers import Tokenizer, models

    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    home = tmp_path / "trainings"
    for name in ("aa-damaged", "bb-other", "mine"):
        (home / name).mkdir(parents=True)
    (home / "aa-damaged" / "tokenizer.json").write_text('{"version": 1')
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(home / "bb-other" / "tokenizer.json"))
    data = (tiny_folder / "tokenizer.json").read_bytes()
    (home / "mine" / "tokenizer.json").write_bytes(data)
    return Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))


def test_a_tokenizer_is_used_only_where_it_spells_the_logged_text(tokenizer: Any) -> None:
    spelled = turn(sampled=tokenizer.encode("def f(): return 漢").ids, text="def f(): return 漢").completion
    decode = Decoders().find("tiny", spelled)
    assert decode is not None
    assert spelled.tokens is not None
    assert "".join(text for text, _ in token_texts(spelled.tokens.sampled_ids, decode)) == spelled.text
    assert Decoders().find("tiny", spelled.model_copy(update={"text": "something else"})) is None
    redacted = TurnTokens(context_ids=(1,), sampled_ids=(REDACTED,), logprobs=(-1.0,))
    assert Decoders().find("tiny", spelled.model_copy(update={"tokens": redacted})) is None
    far = TurnTokens(context_ids=(1,), sampled_ids=(4_000_000_000,), logprobs=(-1.0,))
    assert Decoders().find("../..", spelled.model_copy(update={"tokens": far})) is None


def test_pieces_of_tokens_are_their_text_and_count_them(tokenizer: Any, tiny_folder: Path) -> None:
    decode = load_decoder(tiny_folder / "tokenizer.json")
    assert decode is not None
    for text in ("x", " two  words", "漢字 und ünïcode", "\n\tdef f():\n        pass", "🙂🙂 end"):
        ids = tuple(tokenizer.encode(text).ids)
        found = list(token_texts(ids, decode))
        assert "".join(piece for piece, _ in found) == decode(ids)
        assert sum(count for _, count in found) == len(ids)


# ------------------------------------------------------------------------------------------ server


def client(store: LogStore, **options: Any) -> TestClient:
    return TestClient(view_app(LogView(store), Access(**options)), base_url="http://127.0.0.1:8010")


def test_every_answer_forbids_scripts_frames_and_guessing(store: LogStore) -> None:
    for path in ("/", "/view.js", "/view.css", "/api/runs", "/api/run?id=hostile", "/api/run?id=none"):
        headers = client(store).get(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'; style-src"
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_the_hostile_run_comes_back_as_json_as_it_was(store: LogStore) -> None:
    found = client(store).get("/api/run", params={"id": "hostile"})
    assert found.headers["content-type"] == "application/json"
    assert found.json()["turns"][0]["seen"][0]["text"] == HOSTILE
    assert found.json()["task"] == HOSTILE


def test_a_page_whose_name_resolves_here_is_not_answered(store: LogStore) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8010", ""):
        assert client(store).get("/api/runs", headers={"host": host}).status_code == 403
    for host in ("localhost:8010", "127.0.0.1", "[::1]:8010", "[::1]"):
        assert client(store).get("/api/runs", headers={"host": host}).status_code == 200


def test_a_key_is_asked_for_everything_and_given_once(store: LogStore) -> None:
    locked = client(store, admin_keys=["sesame"])
    for path in ("/", "/view.js", "/api/runs"):
        assert locked.get(path).status_code == 401
    assert locked.get("/?key=wrong", follow_redirects=False).status_code == 401
    assert locked.get("/api/runs", headers={"authorization": "Bearer sesame"}).status_code == 200
    entered = locked.get("/?key=sesame", follow_redirects=False)
    assert entered.status_code == 303
    assert "sesame" not in entered.headers["set-cookie"]
    assert {"httponly", "samesite=strict"} <= {
        p.strip().lower() for p in entered.headers["set-cookie"].split(";")
    }
    assert locked.get("/api/runs").status_code == 200


def test_below_a_path_its_page_its_redirect_and_its_cookie_stay_there(store: LogStore) -> None:
    app = Starlette(routes=[Mount("/view", view_app(LogView(store), Access(admin_keys=["sesame"])))])
    mounted = TestClient(app, base_url="http://127.0.0.1:8000")
    assert mounted.get("/view/").status_code == 401
    entered = mounted.get("/view/?key=sesame", follow_redirects=False)
    assert (entered.status_code, entered.headers["location"]) == (303, "/view/")
    assert "Path=/view/;" in entered.headers["set-cookie"]
    for path in ("/view/", "/view/view.js", "/view/view.css", "/view/api/runs"):
        answer = mounted.get(path)
        assert (answer.status_code, answer.headers["content-security-policy"][:18]) == (
            200, "default-src 'none'",
        )  # fmt: skip
    assert mounted.get("/view", follow_redirects=False).headers["location"].endswith("/view/")


def test_beside_a_server_whose_clients_have_keys_the_admin_alone_sees_the_log(store: LogStore) -> None:
    assert _pages(store, Access(keys=["client"])) == {}
    for keys in ([], ["client"]):
        viewer = _pages(store, Access(keys, ["boss"]))["view"]
        shown = TestClient(viewer, base_url="http://10.0.0.1:8000")
        for key, status in (("client", 401), ("boss", 200)):
            asked = shown.get("/api/runs", headers={"authorization": f"Bearer {key}"})
            assert asked.status_code == status
    alone = _pages(store, Access())["view"]
    assert TestClient(alone, base_url="http://10.0.0.1:8000").get("/").status_code == 403


def test_what_the_browser_has_already_is_not_sent_again(store: LogStore) -> None:
    first = client(store).get("/api/runs")
    again = client(store).get("/api/runs", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    server = client(store)
    assert server.get("/api/runs", headers={"if-none-match": first.headers["etag"]}).status_code == 304
    store.append(run("new", at=999.0))
    assert server.get("/api/runs", headers={"if-none-match": first.headers["etag"]}).status_code == 200


def test_an_unknown_run_and_a_write_are_refused(store: LogStore) -> None:
    unknown = client(store).get("/api/run?id=nothing")
    assert unknown.status_code == 400
    assert "no run 'nothing'" in unknown.json()["error"]
    for method in ("POST", "PUT", "DELETE"):
        assert client(store).request(method, "/api/runs").status_code == 405


# -------------------------------------------------------------------------------------------- file


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_file_holds_its_data_as_text_and_names_its_script_by_hash(store: LogStore) -> None:
    page = render_page(log_answers(LogView(store), 10), start="#/runs", title="log")
    assert page.count("<script") == page.count("</script>") == 2
    assert "owned'</script>" not in page
    assert data_of(page)["answers"]["run id=hostile"]["prompt"] == HOSTILE
    for kind, element in (("script-src", r"<script>(.*?)</script>"), ("style-src", r"<style>(.*?)</style>")):
        (text,) = re.findall(element, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in page
    assert "connect-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!#|data:,)', page)


@pytest.mark.slow
def test_the_file_holds_what_its_views_ask_for(store: LogStore) -> None:
    view = LogView(store)
    answers = run_answers(view, ["run-003"])
    group = answers["run id=run-003"]["group"]["of"]
    pair = answers[answer_key("group", {"id": group})]
    assert answer_key("pair", {"left": pair["best"], "right": pair["worst"]}) in answers
    listed = log_answers(view, 120)
    assert len(listed["runs"]["rows"]) == 120
    assert all(answer_key("run", {"id": row["id"]}) in listed for row in listed["runs"]["rows"])
    assert all(answer_key("group", {"id": row["of"]}) in listed for row in listed["groups"]["rows"])
    with pytest.raises(LogError):
        run_answers(view, ["none"])


def test_the_command_writes_a_file(store: LogStore, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    arguments = ["view", "run-001", "--out", str(out), "--log", store.url]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.output.strip() == str(out)
    assert data_of(out.read_text())["start"] == "#/run?id=run-001"
    for wrong in (["--out", str(tmp_path / "no" / "x.html")], ["nothing", "--out", str(out)],
                  ["--host", "0.0.0.0"]):  # fmt: skip
        with pytest.raises(UsageError):
            CliRunner().invoke(cli, ["view", *wrong, "--log", store.url], catch_exceptions=False)


def test_the_command_serves_the_log(store: LogStore, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "from nano_coder.cli import main; main()"
    arguments = [sys.executable, "-c", code, "view", "--port", "0", "--log", store.url]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as served:
        assert served.stderr is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/", served.stderr.readline())
            assert found
            with httpx.Client(base_url=found[0], timeout=30) as asking:
                for _ in range(100):
                    try:
                        rows = asking.get("/api/runs").json()["rows"]
                        break
                    except httpx.ConnectError:
                        continue
            assert rows[0]["id"] == "hostile"
        finally:
            served.terminate()


def test_an_open_run_is_shown_while_it_goes(tmp_path: Path) -> None:
    store = LogStore.open(tmp_path / "log.db")
    store.begin(run("live", stop=None, verdict=None, ended=None).model_copy(update={"turns": ()}))
    view = LogView(store)
    assert view.run({"id": "live"})["turns"] == []
    store.append_turn("live", turn())
    assert len(view.run({"id": "live"})["turns"]) == 1
    store.finish("live", stop=StopReason.FINISHED, ended=5.0)
    assert view.runs({})["rows"][0]["stop"] == "finished"


# ------------------------------------------------------------------------------------------ scores


def test_weights_tell_the_entropy_and_the_mismatch_of_what_they_sampled(
    tiny_folder: Path, tmp_path: Path, one_thread: None
) -> None:
    from nano_coder.models.opening import open_weights
    from nano_view.token_scorer import TokenScorer

    opened = open_weights(str(tiny_folder))
    ids = tuple(opened.loaded.tokenizer("def f(): return 1")["input_ids"])
    logits = opened.loaded.model(__import__("torch").tensor([[1, 2, *ids]])).logits[0, 1:-1].float()
    logprobs = logits.log_softmax(-1)
    said = tuple(logprobs[range(len(ids)), list(ids)].tolist())
    sampled = turn(sampled=ids)
    tokens = TurnTokens(context_ids=(1, 2), sampled_ids=ids, logprobs=said)
    by_them = {"policy_id": opened.loaded.id, "policy_version": opened.version, "tokens": tokens}
    ours = sampled.model_copy(update={"completion": sampled.completion.model_copy(update=by_them)})
    others = sampled.model_copy(
        update={"completion": sampled.completion.model_copy(update={"tokens": tokens})}
    )
    runs = [run("ours", ours), run("others", others), run("far", turn(sampled=(9_999_999,))),
            run("text", turn(text_only=True))]  # fmt: skip
    scores = TokenScorer(opened)
    view = LogView(log_of(tmp_path / "log.db", runs), scores.of)
    columns = view.run({"id": "ours"})["turns"][0]["tokens"]["columns"]
    assert columns["mismatch"] == pytest.approx([0.0] * len(ids), abs=1e-4)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    assert columns["entropy"] == pytest.approx(entropy.tolist(), abs=1e-4)
    columns = view.run({"id": "others"})["turns"][0]["tokens"]["columns"]
    assert columns["ratio"] == pytest.approx([1.0] * len(ids), abs=1e-4)
    assert scores.of(runs[2]) == scores.of(runs[3]) == {}
