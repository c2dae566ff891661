"""The endpoint policy talks to a chat completions server, and says what to do when that fails."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nano_coder.models.endpoint import EndpointPolicy
from nano_shared import Conversation, Finish, Message, Policy, PolicyError, Role, Sampling


def chat(text: str | None, finish: str = "stop") -> str:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]})


class Server(ThreadingHTTPServer):
    """Answers with the given (status, body) pairs in order, the last one for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, str]] = [(200, chat("hello"))]
        self.seen: list[tuple[str, dict[str, Any], Any]] = []
        self.lock = threading.Lock()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.seen.append((self.path, dict(self.headers), body))
            status, text = server.answers[0] if len(server.answers) == 1 else server.answers.pop(0)
        if status == 0:
            self.close_connection = True
            return  # hangs up without a word
        payload = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def policy(server: Server) -> Iterator[EndpointPolicy]:
    policy = EndpointPolicy("little", server.base_url, retry_seconds=0.001)
    yield policy
    policy.close()


def conversation() -> Conversation:
    return Conversation(
        tuple(
            Message(role=role, content=text)
            for role, text in [
                (Role.SYSTEM, "be good"), (Role.USER, "go"), (Role.ASSISTANT, "ls"), (Role.TOOL, "a.py"),
            ]
        )
    )  # fmt: skip


def test_it_completes_in_text_only(policy: EndpointPolicy, server: Server) -> None:
    assert isinstance(policy, Policy)
    completion = policy.complete(conversation(), Sampling(temperature=0.5, max_tokens=9, seed=4))
    assert (completion.text, completion.finish, completion.tokens) == ("hello", Finish.STOP, None)
    assert completion.policy_id == "openai:little"


def test_it_sends_every_message_and_the_sampling(policy: EndpointPolicy, server: Server) -> None:
    policy.complete(conversation(), Sampling(temperature=0.5, top_p=0.9, max_tokens=9, seed=4))
    ((path, headers, body),) = server.seen
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert body == {
        "model": "little",
        "messages": [
            {"role": "system", "content": "be good"},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "ls"},
            {"role": "user", "content": "a.py"},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
        "seed": 4,
    }


def test_it_sends_the_key(server: Server) -> None:
    policy = EndpointPolicy("little", server.base_url + "/", "s3cret")
    policy.complete(conversation(), Sampling())
    assert server.seen[0][1]["Authorization"] == "Bearer s3cret"
    policy.close()


def test_a_length_finish_is_reported(policy: EndpointPolicy, server: Server) -> None:
    server.answers = [(200, chat("hel", "length"))]
    assert policy.complete(conversation(), Sampling()).finish is Finish.LENGTH


@pytest.mark.parametrize("failure", [(500, "oops"), (503, "loading"), (429, "slow down"), (0, "")])
def test_a_passing_failure_is_retried(
    policy: EndpointPolicy, server: Server, failure: tuple[int, str]
) -> None:
    server.answers = [failure, failure, (200, chat("at last"))]
    assert policy.complete(conversation(), Sampling()).text == "at last"
    assert len(server.seen) == 3


def test_retries_are_bounded(policy: EndpointPolicy, server: Server) -> None:
    server.answers = [(500, "out of memory")]
    with pytest.raises(PolicyError, match=r"/v1/chat/completions answered 500: 'out of memory'"):
        policy.complete(conversation(), Sampling())
    assert len(server.seen) == 4


@pytest.mark.parametrize(
    ("status", "way_out"), [(400, "server's log"), (401, "API key"), (404, "--base-url")]
)
def test_a_refusal_is_not_retried(policy: EndpointPolicy, server: Server, status: int, way_out: str) -> None:
    server.answers = [(status, "no")]
    with pytest.raises(PolicyError, match=f"answered {status}: 'no'; .*{way_out}"):
        policy.complete(conversation(), Sampling())
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "answer", ["<html>", "[]", "{}", '{"choices": []}', '{"choices": [{"message": 3}]}', "null"]
)
def test_an_answer_that_is_no_completion_is_quoted(
    policy: EndpointPolicy, server: Server, answer: str
) -> None:
    server.answers = [(200, answer)]
    with pytest.raises(PolicyError, match="something else than a chat completion") as raised:
        policy.complete(conversation(), Sampling())
    assert repr(answer) in str(raised.value)


def test_an_answer_without_text_is_refused(policy: EndpointPolicy, server: Server) -> None:
    server.answers = [(200, chat(None, "tool_calls"))]
    with pytest.raises(PolicyError, match=r"answered without text .finish_reason 'tool_calls'"):
        policy.complete(conversation(), Sampling())


def test_a_refused_connection_names_the_url(server: Server) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        policy = EndpointPolicy("little", url, retry_seconds=0.001)
        with pytest.raises(
            PolicyError, match=rf"no answer from {url}/chat/completions: .*is the server running"
        ):
            policy.complete(conversation(), Sampling())
        policy.close()


def test_a_base_url_that_is_none_is_a_policy_error() -> None:
    policy = EndpointPolicy("little", "localhost:1", retry_seconds=0.001)
    with pytest.raises(PolicyError, match="localhost:1/chat/completions"):
        policy.complete(conversation(), Sampling())
    policy.close()


def test_many_threads_share_it(policy: EndpointPolicy, server: Server) -> None:
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(policy.complete(conversation(), Sampling()).text))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["hello"] * 8


def test_tokens_are_estimated(policy: EndpointPolicy) -> None:
    assert [policy.count(text) for text in ("", "a", "four", "fiver")] == [0, 1, 1, 2]


# ------------------------------------------------------------------------- servers that answer too much


def answering(head: bytes, forever: bytes = b"", pause: float = 0.0) -> Iterator[str]:
    """A server that sends `head`, and then a piece again and again until its client hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                client.sendall(head)
                while forever:
                    client.sendall(forever)
                    time.sleep(pause)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "forever", "pause", "told"),
    [
        (OK + b"\r\n", b"x" * (1 << 20), 0.0, "answered more than 16 MB"),
        (
            OK + b"Content-Type: text/html\r\nContent-Length: 3\r\n\r\n<p>",
            b"",
            0.0,
            "something else than a chat",
        ),
        (OK + b"\r\n", b" ", 0.05, "no whole answer within 3 s"),
        (OK, b"X-More: x\r\n", 0.05, "no whole answer within 3 s"),
        (OK, b"X-More: " + b"x" * 1000 + b"\r\n", 0.0, "no answer from"),
        (b"nonsense\r\n\r\n", b"", 0.0, "no answer from"),
    ],
    ids=["endless", "a page", "a slow drip", "slow headers", "endless headers", "no http"],
)
def test_an_answer_is_bounded_in_size_and_time(head: bytes, forever: bytes, pause: float, told: str) -> None:
    for url in answering(head, forever, pause):
        policy = EndpointPolicy("little", url, timeout=3.0 if pause else 100.0, attempts=1)
        with pytest.raises(PolicyError, match=told):
            policy.complete(conversation(), Sampling())
        policy.close()


@pytest.mark.parametrize(
    "body", ["[" * 100_000, '{"choices": ' + "9" * 10_000 + "}", "\ufeff{", "null", '{"choices": {}}']
)
def test_what_is_no_completion_is_one_sentence(policy: EndpointPolicy, server: Server, body: str) -> None:
    server.answers = [(200, body)]
    with pytest.raises(PolicyError, match="something else than a chat completion") as refused:
        policy.complete(conversation(), Sampling())
    assert len(str(refused.value)) < 1000


def test_a_text_beyond_all_tokens_is_cut(policy: EndpointPolicy, server: Server) -> None:
    server.answers = [(200, chat("\ud800" + "a" * 1_000_000))]
    completion = policy.complete(conversation(), Sampling(max_tokens=9))
    assert (completion.text, completion.finish) == ("\\ud800" + "a" * 899, Finish.LENGTH)
