"""Random clients of one server over HTTP, compared with its log: what each turn holds, and what it follows.

Each request bears its number as the client's name, by which the log tells the turn that answers it. Openings
are of few texts in several sessions, so that conversations with equal beginnings are everywhere; what goes on
is chosen from all that was answered before, by any client, over any API.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from test_serve import Served, serve, tiny  # noqa: F401 (fixtures)

from nano_coder.verify.tokens import MAX_GAP, TokenCheck, rescored
from nano_shared.types import AMBIGUOUS_TOOLS, Finish, Trajectory, Turn

Said = tuple[str, str]
"""role and text of a message"""
PATHS = {
    "chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses",
    "completions": "/v1/completions",
}  # fmt: skip
SESSIONS = ("", "a", "b", "c")
OPENINGS = ("Say hello.", "Read the file.", "Read the file.\n")
LENGTH = {"responses": "max_output_tokens"}


@dataclass(eq=False, kw_only=True)
class Asked:
    """A request, and what its client read of the answer."""

    number: int
    dialect: str
    session: str
    messages: tuple[Said, ...]
    parent: Asked | None = None
    """whose whole answer the history ends with, in the same session"""
    sampling: dict[str, Any] = field(default_factory=dict)
    hangs_up: bool = False
    text: str = ""
    ids: list[int] | None = None
    whole: bool = False

    @property
    def body(self) -> dict[str, Any]:
        more = {key: value for key, value in self.sampling.items() if key != "tokens"}
        body = more | {
            LENGTH.get(self.dialect, "max_tokens"): self.sampling["tokens"],
            "return_token_ids": True,
        }
        if self.dialect == "completions":
            return body | {"prompt": self.messages[-1][1]}
        messages = [{"role": role, "content": text} for role, text in self.messages]
        if self.dialect == "responses":
            return body | {"input": messages}
        if self.dialect == "messages" and messages[0]["role"] == "system":
            body["system"] = messages.pop(0)["content"]
        return body | {"messages": messages}


class Clients:
    """Ask in threads, each request after another, and remember what was asked and read."""

    def __init__(self, root: str, requests: int, seed: int) -> None:
        self._root, self._seed = root, seed
        self._lock = threading.Lock()
        self.asked: list[Asked] = []
        with httpx.Client(timeout=300) as self._http, ThreadPoolExecutor(8) as threads:
            list(threads.map(self._one, range(requests)))

    def _one(self, number: int) -> None:
        asked = self._next(number, random.Random(f"{self._seed}:{number}"))
        url, client = self._root + PATHS[asked.dialect], {"User-Agent": f"q{number}"}
        if asked.session and number % 2:
            url = f"{self._root}/sessions/{asked.session}{PATHS[asked.dialect]}"
        elif asked.session:
            client["X-Session-Id"] = asked.session
        self._ask(asked, url, client)
        with self._lock:
            self.asked.append(asked)

    def _next(self, number: int, rng: random.Random) -> Asked:
        dialect = rng.choice(tuple(PATHS))
        sampling = {
            "temperature": rng.choice([0, 0.7, 1]), "tokens": rng.randint(1, 8), "stream": rng.random() < 0.5,
            **({"seed": rng.randint(0, 3)} if rng.random() < 0.5 else {}),
        }  # fmt: skip
        if rng.random() < 0.2:
            sampling["stop_sequences" if dialect == "messages" else "stop"] = ["e"]
        hangs_up = rng.random() < 0.1
        sampling |= {"stream": True, "tokens": 60} if hangs_up else {}
        more = {"number": number, "dialect": dialect, "sampling": sampling, "hangs_up": hangs_up}
        with self._lock:
            answered = [each for each in self.asked if each.text.strip() and each.dialect != "completions"]
        if not answered or dialect == "completions" or rng.random() < 0.25:
            system = (("system", "Be brief."),) if dialect != "completions" and rng.random() < 0.4 else ()
            opening = (*system, ("user", rng.choice(OPENINGS)))
            return Asked(session=rng.choice(SESSIONS), messages=opening, **more)
        before = rng.choice(answered)
        messages = (
            *before.messages,
            ("assistant", before.text),
            ("user", rng.choice(["Go on.", f"{number}"])),
        )
        session, parent, roll = before.session, before if before.whole else None, rng.random()
        if roll < 0.15:
            session, parent = rng.choice(SESSIONS), None
        elif roll < 0.3:
            at = rng.randrange(len(messages) - 1)
            messages = (*messages[:at], (messages[at][0], messages[at][1] + " (again)"), *messages[at + 1 :])
            parent = None
        return Asked(session=session, messages=messages, parent=parent, **more)

    def _ask(self, asked: Asked, url: str, headers: dict[str, str]) -> None:
        if not asked.sampling["stream"]:
            answer = self._http.post(url, json=asked.body, headers=headers)
            assert answer.status_code == 200, answer.text
            asked.text, asked.ids = read(asked.dialect, answer.json())
            asked.whole = True
            return
        with self._http.stream("POST", url, json=asked.body, headers=headers) as answer:
            assert answer.status_code == 200, answer.read()
            ids: list[int] = []
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text, new = read_event(asked.dialect, json.loads(line[6:]))
                    asked.text += text
                    ids += new
                if asked.hangs_up and asked.text:
                    return
        asked.ids = None if asked.dialect == "messages" else ids
        asked.whole = True


def read(dialect: str, answer: dict[str, Any]) -> tuple[str, list[int] | None]:
    if dialect == "messages":
        return "".join(part["text"] for part in answer["content"]), None
    if dialect == "responses":
        return "".join(p["text"] for item in answer["output"] for p in item["content"]), answer["token_ids"]
    (choice,) = answer["choices"]
    return choice["text"] if dialect == "completions" else choice["message"]["content"], choice["token_ids"]


def read_event(dialect: str, event: dict[str, Any]) -> tuple[str, list[int]]:
    if dialect == "messages":
        return event["delta"]["text"] if event["type"] == "content_block_delta" else "", []
    if dialect == "responses":
        text = event["delta"] if event["type"] == "response.output_text.delta" else ""
        return text, event.get("response", {}).get("token_ids", [])
    (choice,) = event["choices"]
    text = choice["text"] if dialect == "completions" else choice["delta"].get("content", "")
    return text, choice.get("token_ids", [])


Place = tuple[Trajectory, Turn]


class Captured:
    """The log, turn by turn, with the request of each."""

    def __init__(self, server: Served) -> None:
        self.runs = {run.id: run for run in server.runs()}
        rows = server.store.sql("SELECT client, session, run_id, turn FROM requests").rows
        self.places: dict[int, list[Place]] = {}
        self.sessions: dict[tuple[str, int], str] = {}
        for client, session, run, turn in rows:
            self.places.setdefault(int(client[1:]), []).append((self.runs[run], self.runs[run].turns[turn]))
            self.sessions[run, turn] = session

    def session(self, run: Trajectory, turn: int) -> str:
        """Of a turn, which a fork has from the run that it forked."""
        while (run.id, turn) not in self.sessions:
            assert run.parent is not None
            run = self.runs[run.parent]
        return self.sessions[run.id, turn]


def said_in(run: Trajectory, turns: int) -> list[Said]:
    """The conversation of a run before a turn, its answers as a client is shown them."""
    said: list[Said] = []
    for turn in run.turns[:turns]:
        said += [(m.role.value, m.content) for m in turn.messages]
        said.append(("assistant", shown(turn)))
    return said


def shown(turn: Turn) -> str:
    text = turn.completion.text
    return text[: text.index("e")] if "e" in turn.completion.sampling.stop and "e" in text else text


def stripped(said: Any) -> list[Said]:
    return [(role, text.strip()) for role, text in said]


def row(run: Trajectory, turns: int) -> list[tuple[int, ...]]:
    """Context and sampled ids of each of the first turns."""
    tokens = [turn.completion.tokens for turn in run.turns[:turns]]
    return [ids for each in tokens if each for ids in (each.context_ids, each.sampled_ids)]


def findings(captured: Captured, clients: Clients) -> Iterator[str]:
    """What of the log is not what the clients asked and read."""
    for asked in clients.asked:
        places = captured.places.get(asked.number, [])
        if len(places) != 1:
            yield f"q{asked.number} is {len(places)} turns"
            continue
        ((run, turn),) = places
        said = [*said_in(run, turn.index), *((m.role.value, m.content) for m in turn.messages)]
        if stripped(said) != stripped(asked.messages):
            yield f"q{asked.number} joined a wrong conversation: {said} for {asked.messages}"
        if any(captured.session(run, at) != asked.session for at in range(turn.index + 1)):
            yield f"q{asked.number} joined another session"
        tokens = turn.completion.tokens
        if tokens is None or (asked.ids is not None and tuple(asked.ids) != tokens.sampled_ids):
            yield f"q{asked.number}: other ids than its client read"
        if shown(turn) != asked.text if asked.whole else not shown(turn).startswith(asked.text):
            yield f"q{asked.number}: {asked.text!r} was read of {shown(turn)!r}"
        if asked.parent is not None:
            yield from not_continued(captured, asked, run, turn)


def not_continued(captured: Captured, asked: Asked, run: Trajectory, turn: Turn) -> Iterator[str]:
    """A request that extends a conversation continues its tokens, unless two were sampled in other ways."""
    assert asked.parent is not None
    ((before, answered),) = captured.places[asked.parent.number]
    if row(run, turn.index) == row(before, answered.index + 1):
        return
    history = stripped(asked.messages[:-1])
    samples = {
        tuple(row(other, at.index + 1))
        for places in captured.places.values() for other, at in places
        if captured.session(other, at.index) == asked.session
        and stripped(said_in(other, at.index + 1)) == history
    }  # fmt: skip
    if not (run.tools_hash.startswith(AMBIGUOUS_TOOLS) and turn.index == 0 and len(samples) > 1):
        yield f"q{asked.number} did not continue q{asked.parent.number}, of {len(samples)} samples"


def check(server: Served, requests: int, seed: int) -> dict[str, Any]:
    """Make the requests, and compare. Returns what was covered."""
    clients = Clients(server.root, requests, seed)
    server.close()
    captured = Captured(server)
    assert list(findings(captured, clients)) == []
    policy: Any = server.policy
    tokens = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=server.store.blobs)
    worst = 0.0
    for run in captured.runs.values():
        assert tokens.findings(run) == []
        if run.parent is not None:
            parent, at = captured.runs[run.parent], run.parent_step or 0
            assert row(run, at) == row(parent, at)
        worst = max([worst, *(abs(each.recomputed - each.recorded) for each in rescored(run, policy.engine))])
    assert worst <= MAX_GAP
    turns = [turn for places in captured.places.values() for _, turn in places]
    runs = captured.runs.values()
    return {
        "requests": len(clients.asked), "apis": Counter(each.dialect for each in clients.asked),
        "streamed": sum(each.sampling["stream"] for each in clients.asked), "runs": len(runs),
        "continued": sum(turn.index > 0 for turn in turns),
        "forks": sum(run.parent is not None for run in runs),
        "cancelled": sum(turn.completion.finish is Finish.CANCELLED for turn in turns),
        "ambiguous": sum(run.tools_hash.startswith(AMBIGUOUS_TOOLS) for run in runs),
        "largest difference of log-probs, nats": worst,
    }  # fmt: skip


@pytest.mark.slow
def test_every_turn_is_what_its_client_asked_and_follows_what_it_read(
    tiny: Served,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few conversations are held, so that others are found again in the log."""
    monkeypatch.setattr("nano_apis.conversations.MOST_HELD", 12)
    covered = check(tiny, 35, seed=0)
    assert min(covered["continued"], covered["forks"], covered["streamed"]) > 2, covered
    assert set(covered["apis"]) == set(PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("held", [1024, 40])
def test_a_thousand_requests(
    tiny: Served,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    held: int,
) -> None:
    """`pytest -s -m slow -k a_thousand` prints what was covered."""
    monkeypatch.setattr("nano_apis.conversations.MOST_HELD", held)
    print(check(tiny, 1000, seed=held))
