"""A real chat-completions server on localhost whose judge misbehaves as it is told to."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Behaviour = Callable[[str], str]
"""the user's question -> the judge's answer"""
WORD = re.compile(r"\b(?:first|second|equal|kept|broken)-[0-9a-f]{8}\b")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, behaviour: Behaviour, *, drip: float = 0.0, status: int = 200, raw: bytes | None = None
    ):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour, self.drip, self.status, self.raw = behaviour, drip, status, raw
        self.questions: list[str] = []

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to the body of a request."""
        self.questions.append(question := asked["messages"][-1]["content"])
        return {"choices": [{"message": {"content": self.behaviour(question)}}]}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


AnyServer = TypeVar("AnyServer", bound=Server)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        answer = server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        payload = server.raw if server.raw is not None else json.dumps(answer).encode()
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        try:
            if not server.drip:
                self.wfile.write(payload)
            else:
                for byte in payload:  # each read is quick, the whole is not
                    self.wfile.write(bytes([byte]))
                    time.sleep(server.drip)
        except OSError:
            pass  # the asker has hung up

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(server: AnyServer) -> Iterator[AnyServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judging(behaviour: Behaviour, **settings: Any) -> AbstractContextManager[Server]:
    return serving(Server(behaviour, **settings))


def words(question: str) -> dict[str, str]:
    """Meaning -> answer word, as the question lists them."""
    return {word.split("-")[0]: word for word in WORD.findall(question.split("Answer words:")[1])}


def works(question: str) -> list[str]:
    """What stands between marks: the task, then each candidate's work."""
    return [
        json.loads(text)
        for text in re.findall(r"<([0-9a-f]{16})>\n(?P<text>.*)\n</\1>", question)
        for text in [text[1]]
    ]


def honest(better: Callable[[str], float]) -> Behaviour:
    """A sound judge: the work of the higher worth wins, wherever it stands."""

    def answer(question: str) -> str:
        choices = words(question)
        quoted = works(question)
        if "kept" in choices:
            return f"I think so.\n{choices['kept' if better(quoted[1]) > 0 else 'broken']}"
        first, second = better(quoted[1]), better(quoted[2])
        meaning = "equal" if first == second else "first" if first > second else "second"
        return f"The work differs.\n{choices[meaning]}"

    return answer


def right(work: str) -> float:
    return float("return a + b" in work)
