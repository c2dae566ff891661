"""Who may do what over HTTP: the table, cell by cell, over the real applications."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from test_serve import ASK, Served
from typer.testing import CliRunner

from nano_apis.app import serve_app
from nano_apis.conversations import Conversations
from nano_apis.served_models import ServedModel
from nano_coder.agent.profiles import HERMES_1
from nano_coder.cli import cli
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.serve.access import Access, listening_socket, opened_access, root_of
from nano_formats.nemo_gym.server import GymSessions, gym_app
from nano_rl.cli import cli as rl
from nano_shared.errors import UsageError
from nano_shared.owners import User
from nano_shared.store import LogStore
from nano_shared.types import Share
from nano_view.answers import LogView
from nano_view.app import view_app

KEYS = {"none": None, "A": "key-of-alice", "B": "key-of-bob", "admin": "key-of-boss"}
ASKED = {"model": "tiny", "messages": [ASK]}
ANSWERED = [*ASKED["messages"], {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
CELLS = {
    # what is asked of alice's server, after her session `a` -> no key, her key, bob's key, the admin key
    "health": ("GET", "/health", None, 200, 200, 200, 200),
    "models": ("GET", "/v1/models", None, 401, 200, 200, 200),
    "chat": ("POST", "/v1/chat/completions", ASKED, 401, 200, 200, 200),
    "count": ("POST", "/v1/messages/count_tokens", {"messages": [ASK]}, 401, 200, 200, 200),
    "tokenise": ("POST", "/tokenize", {"prompt": "x"}, 401, 400, 400, 400),  # a script has no tokens
    "read": ("GET", "/sessions/a", None, 401, 200, 404, 200),
    "reward": ("POST", "/sessions/a/reward", {"reward": 1}, 401, 200, 404, 200),
    "replace": ("POST", "/sessions/a/reward", {"reward": 1, "replace": True}, 401, 403, 403, 200),
    "load": ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"}, 401, 403, 403, 400),
    "unload": ("POST", "/v1/unload_lora_adapter", {"lora_name": "x"}, 401, 403, 403, 400),
    "metrics": ("GET", "/metrics", None, 401, 403, 403, 200),
    "view": ("GET", "/view/", None, 401, 401, 401, 200),
    "runs": ("GET", "/view/api/runs", None, 401, 401, 401, 200),
}  # fmt: skip


def header(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[who]}"} if KEYS[who] else {}


class Asked:
    """The application of `nano-coder serve`, and its log."""

    def __init__(self, folder: Path, access: Access) -> None:
        self.store = LogStore.open(folder / "log.db")
        model = ServedModel(
            policy=ScriptedPolicy(["hi"] * 20), profile=HERMES_1, store=self.store, name="tiny"
        )
        pages = {"view": view_app(LogView(self.store), access)}
        app = serve_app(Conversations(model), access=access, pages=pages)
        self.client = TestClient(app, base_url="http://127.0.0.1:8000")

    def ask(self, who: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.client.request(method, path, json=body, headers=header(who) | headers)


@pytest.fixture
def server(tmp_path: Path) -> Asked:
    access = Access([KEYS["A"], KEYS["B"]], [KEYS["admin"]])  # type: ignore[list-item]
    asked = Asked(tmp_path, access)
    assert asked.ask("A", "POST", "/sessions/a/v1/chat/completions", ASKED).status_code == 200
    return asked


@pytest.mark.some(14)
@pytest.mark.parametrize("who", KEYS)
@pytest.mark.parametrize("cell", CELLS)
def test_the_table(server: Asked, cell: str, who: str) -> None:
    method, path, body, *statuses = CELLS[cell]
    answer = server.ask(who, method, path, body)
    assert answer.status_code == statuses[list(KEYS).index(who)], answer.text


def test_a_session_that_is_not_ones_own_looks_like_none(server: Asked) -> None:
    for path, method, body in (("", "GET", None), ("/reward", "POST", {"reward": 1})):
        there = server.ask("B", method, f"/sessions/a{path}", body)
        nowhere = server.ask("B", method, f"/sessions/b{path}", body)
        assert there.status_code == nowhere.status_code == 404
        assert there.text.replace("'a'", "'b'") == nowhere.text


@pytest.mark.parametrize("path", ["/sessions/a/v1/chat/completions", "/v1/chat/completions"])
def test_a_conversation_is_continued_by_the_key_that_began_it(tmp_path: Path, path: str) -> None:
    server = Asked(tmp_path, Access([KEYS["A"], KEYS["B"]], [KEYS["admin"]]))  # type: ignore[list-item]
    server.ask("A", "POST", path, ASKED)
    for who in ("B", "admin", "A"):
        assert server.ask(who, "POST", path, {**ASKED, "messages": ANSWERED}).status_code == 200
    turns = sorted(len(server.store.get(run.id).turns) for run in server.store.runs())
    assert turns == [1, 1, 2]
    assert all(server.store.get(run.id).parent is None for run in server.store.runs())


@pytest.mark.parametrize("share", Share)
def test_a_run_is_of_the_key_that_asked_else_of_the_servers_owner(tmp_path: Path, share: Share) -> None:
    server = Asked(tmp_path, Access([KEYS["A"], KEYS["B"]], [KEYS["admin"]]))  # type: ignore[list-item]
    server.store.user = User(name="op@host", share=share)
    for who in ("A", "B", "admin"):
        server.ask(who, "POST", "/v1/chat/completions", ASKED)
    server.ask("A", "POST", "/v1/chat/completions", {**ASKED, "messages": ANSWERED})
    runs = [server.store.get(run.id) for run in server.store.runs()]
    owner_of = {run.owner: (run.share, len(run.turns)) for run in runs}
    clients = Share.TEAM if share is Share.NEVER else share
    assert owner_of.pop("op@host") == (share, 1)
    assert sorted(owner_of.values()) == [(clients, 1), (clients, 2)]
    assert [run.owner for run in server.store.runs(by=None)] == ["op@host"]


def test_a_later_server_knows_whose_a_session_is(server: Asked, tmp_path: Path) -> None:
    later = Asked(tmp_path, Access([KEYS["A"], KEYS["B"]], []))  # type: ignore[list-item]
    for who, status in (("A", 200), ("B", 404)):
        assert later.ask(who, "GET", "/sessions/a").status_code == status
    assert later.client.get("/metrics", headers=header("A")).status_code == 403
    keyless = Asked(tmp_path, Access())
    assert keyless.ask("none", "GET", "/sessions/a").status_code == 404
    assert KEYS["A"] not in (tmp_path / "log.db").read_bytes().decode("latin-1")


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "given",
    [
        {"reward": 1e6}, {"reward": -1001}, {"reward": True}, {"reward": "1"}, {},
        {"reward": 1, "components": {"x": 1e6}}, {"reward": 1, "components": {"x": True}},
        {"reward": 1, "components": {"x": None}}, {"reward": 1, "components": {"x" * 101: 1}},
        {"reward": 1, "components": {str(i): 1 for i in range(65)}}, {"reward": 1, "components": [1]},
    ],
)  # fmt: skip
def test_a_reward_is_bounded(server: Asked, given: dict[str, Any]) -> None:
    assert server.ask("A", "POST", "/sessions/a/reward", given).status_code == 400
    endless = b'{"reward": 1, "components": {"x": 1e999}}'
    answer = server.client.post("/sessions/a/reward", content=endless, headers=header("A"))
    assert answer.status_code == 400
    assert server.ask("A", "POST", "/sessions/a/reward", {"reward": 1}).json()["reward"] == 1


@pytest.mark.parametrize("access", [Access(), Access(admin_keys=[str(KEYS["admin"])])], ids=["none", "admin"])
def test_without_a_key_a_page_of_the_web_reaches_nothing(tmp_path: Path, access: Access) -> None:
    server = Asked(tmp_path, access)
    for odd in ({"host": "evil.example"}, {"host": ""}, {"host": "[::1"}, {"origin": "http://evil.example"},
                {"origin": "null"}, {"origin": "http://[::1"}):  # fmt: skip
        for path in ("/v1/chat/completions", "/sessions/a/reward"):
            answer = server.ask("none", "POST", path, ASKED, **odd)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (403, True), (odd, path)
        assert server.ask("none", "GET", "/view/api/runs", **odd).status_code in (401, 403)
    assert server.ask("none", "POST", "/v1/chat/completions", ASKED).status_code == 200
    assert server.ask("none", "GET", "/metrics").status_code == (401 if access.admin_keys else 200)


PROGRAM = """
import json, sys, urllib.error, urllib.request
for path, body in json.loads(sys.argv[2]):
    asked = urllib.request.Request(sys.argv[1] + path, body and json.dumps(body).encode())
    try:
        print(urllib.request.urlopen(asked).status)
    except urllib.error.HTTPError as problem:
        print(problem.code)
"""


@pytest.mark.as_root
@pytest.mark.parametrize("user", [None, 12345])
def test_without_a_key_programs_of_other_users_are_refused(tmp_path: Path, user: int | None) -> None:
    import json

    store = LogStore.open(tmp_path / "log.db")
    model = ServedModel(policy=ScriptedPolicy(["hi"] * 3), profile=HERMES_1, store=store, name="tiny")
    server = Served(model, access=opened_access("127.0.0.1", None))
    asked = [["/v1/chat/completions", ASKED], ["/sessions/x/reward", {"reward": 1}], ["/metrics", None]]
    try:
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", PROGRAM, server.root, json.dumps(asked)],
            user=user, cwd="/", capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        server.close()
    assert done.stdout.split() == (["403"] * 3 if user else ["200", "404", "200"])


@pytest.mark.some(8)
@pytest.mark.parametrize("command", [(cli, "serve"), (cli, "view"), (rl, "tasks serve")], ids=lambda c: c[1])
@pytest.mark.parametrize(
    ("options", "variables", "problem"),
    [
        (["--key", ""], {}, "--key is empty"),
        (["--key", "  "], {}, "--key is empty"),
        (["--key", "good", "--key", ""], {}, "--key is empty"),
        (["--key", "a\nb"], {}, "cannot be sent in a header"),
        (["--key", "schlüssel"], {}, "cannot be sent in a header"),
        (["--host", "0.0.0.0"], {}, "give clients a --key"),
        (["--host", "0.0.0.0", "--key", "short"], {}, "has 5 characters"),
        ([], {"KEY": ""}, "is set, and empty"),
        ([], {"KEY": " "}, "is set, and empty"),
    ],
)
def test_what_is_no_secret_is_refused(
    command: Any, options: list[str], variables: dict[str, str], problem: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    app, name = command
    for value in variables.values():
        monkeypatch.setenv(f"NANO_{name.split()[0].upper()}_KEY", value)
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"key": "a", "prompt": "Do it."}\n')
    more = [str(file)] if "tasks" in name else []
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=problem):
        CliRunner().invoke(app, [*name.split(), *more, *options], catch_exceptions=False)


def test_an_admin_key_is_checked_as_a_clients_is() -> None:
    for keys, admin, problem in (
        (["a" * 16], [""], "--admin-key is empty"), (["a" * 16], ["short"], "--admin-key has 5 characters"),
        (["a" * 16], ["a" * 16], "are the same"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            opened_access("0.0.0.0", keys, admin)


# --------------------------------------------------------------------------------------------- tasks


@pytest.fixture
def gym() -> Iterator[TestClient]:
    from nano_shared.types import Task

    class Nothing:
        touched, tools = 0.0, ()

        def close(self) -> None: ...

    sessions = GymSessions(lambda task: Nothing(), most=9, idle_seconds=float("inf"))  # type: ignore[arg-type, return-value]
    app = gym_app([Task(key="ask", prompt="2 + 2?")], sessions, Access([KEYS["A"], KEYS["B"]]))  # type: ignore[list-item]
    with TestClient(app, base_url="http://127.0.0.1:8010") as client:
        yield client


def test_sessions_on_tasks_belong_to_a_key_too(gym: TestClient) -> None:
    seed = {"verifier_metadata": {"nano_key": "ask"}, "resources_session_id": "mine"}
    for path in ("/seed_session", "/verify", "/close_session", "/read_file", "/aggregate_metrics"):
        assert gym.post(path, json=seed).status_code == 401
    assert gym.post("/seed_session", json=seed, headers=header("A")).status_code == 200
    cookie = {"cookie": "nano_session=mine"}
    assert gym.post("/read_file", json={}, headers=header("B") | cookie).status_code == 410
    assert gym.post("/read_file", json={}, headers=header("A") | cookie).status_code == 404  # no such tool
    gym.post("/close_session", json={"resources_session_id": "mine"}, headers=header("B"))
    assert gym.post("/read_file", json={}, headers=header("A") | cookie).status_code == 404


def test_a_page_of_the_web_opens_no_session_on_a_task() -> None:
    client = TestClient(gym_app([], GymSessions(None, most=1, idle_seconds=9)), base_url="http://127.0.0.1")  # type: ignore[arg-type]
    for odd in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        answer = client.post("/seed_session", content=b"{}", headers={"content-type": "text/plain", **odd})
        assert (answer.status_code, "does not answer" in answer.json()["detail"]) == (403, True)
    assert client.post("/seed_session", json={}).status_code == 422


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_url_of_a_server_is_one(host: str, shown: str) -> None:
    try:
        listening = listening_socket(host, 0)
    except UsageError:
        pytest.skip("this machine has no such address")
    with listening:
        assert root_of(host, listening) == f"http://{shown}:{listening.getsockname()[1]}"
