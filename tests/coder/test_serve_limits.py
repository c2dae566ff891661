"""One client keeps nobody else waiting: long texts, large bodies, many choices, idle connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_serve import Served

from nano_apis.generation import FairQueue, ServerLimits
from nano_apis.served_models import ServedModel
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.serve.access import BoundedConnection
from nano_shared.store import LogStore

WORDS = "ab cd "
LISTS = '{"messages": [' + "[]," * 500_000 + "[]]}"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    opened = open_weights(str(tiny_folder))
    policy = local_policy(opened.loaded, opened.profile, scheduler="free")
    store = LogStore.open(tmp_path_factory.mktemp("served") / "log.db")
    model = ServedModel(policy=policy, profile=opened.profile, store=store, name="tiny")
    server = Served(model, limits=ServerLimits(concurrent=4, waiting=12))
    yield server
    server.close()


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4}


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, said(WORDS * 600_000), 400), ("/v1/messages", said(WORDS * 600_000), 400),
        ("/v1/messages/count_tokens", {"messages": said(WORDS * 600_000)["messages"]}, 400),
        ("/v1/responses", {"input": WORDS * 600_000}, 400),
        ("/v1/completions", {"prompt": WORDS * 600_000}, 400),
        ("/tokenize", {"prompt": WORDS * 600_000}, 400), ("/v1/completions", {"prompt": [1] * 200_000}, 400),
        ("/detokenize", {"tokens": [1] * 200_000}, 400), ("/detokenize", {"tokens": [1] * 1_000_000}, 413),
        (CHAT, said(WORDS * 1_000_000), 413), (CHAT, LISTS, 413),
        (CHAT, said("x") | {"stop": ["zz"] * 65}, 400),
        (CHAT, said("x") | {"stop": "z" * 1025}, 400),
    ],
    ids=lambda value: value.split("/")[-1] if isinstance(value, str) and value.startswith("/") else "",
)  # fmt: skip
def test_what_is_too_long_is_never_encoded(
    tiny: Served, path: str, body: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: Any = tiny.policy
    encoder, encoded = policy.template.encoder, []
    plain = type(encoder).rendered
    monkeypatch.setattr(type(encoder), "rendered", lambda *a: encoded.append(a) or plain(*a))
    content = body if isinstance(body, str) else json.dumps(body)
    answer = httpx.post(f"{tiny.root}{path}", content=content, timeout=60)
    assert (answer.status_code, encoded) == (status, []), answer.text[:300]
    assert len(answer.text) < 500
    assert answer.json()["error"]["message"]
    assert httpx.get(f"{tiny.root}/health").status_code == 200


def test_a_bound_never_refuses_what_fits(tiny: Served) -> None:
    policy: Any = tiny.policy
    encoder = policy.template.encoder
    for text in ("x", WORDS * 5_000, "ä€\U0001f600 " * 4_000, " " * 40_000, "def f(x): return x\n" * 3_000):
        count = len(encoder.text(text))
        assert not encoder.surely_more([text], count)
        assert encoder.surely_more([text], count // 2) or len(text) <= count // 2 + len(text) // 32
        assert encoder.text(text) == list(encoder._plain.encode(text, add_special_tokens=False).ids)


def test_other_clients_go_on_beside_one_of_many_choices(tiny: Served) -> None:
    """The other one's answer is there before the many, of which some have not even begun."""
    ended: list[str] = []
    begun = threading.Event()

    def ask_many() -> None:
        body = {**said("x"), "stream": True, "n": 8, "min_tokens": 150, "max_tokens": 150}
        with httpx.stream("POST", f"{tiny.root}{CHAT}", json=body, timeout=120) as answer:
            for _ in answer.iter_lines():
                begun.set()
        ended.append("many")

    many = threading.Thread(target=ask_many)
    many.start()
    assert begun.wait(60)
    one = httpx.post(f"{tiny.root}{CHAT}", json={**said("x"), "min_tokens": 4, "max_tokens": 4}, timeout=120)
    ended.append("one")
    many.join()
    assert (one.status_code, ended) == (200, ["one", "many"])


def test_choices_count_as_requests(tiny: Served) -> None:
    """4 at a time and 12 that wait: 16 choices are the most beside others."""
    with httpx.stream(
        "POST", f"{tiny.root}{CHAT}", timeout=60,
        json=said("x") | {"stream": True, "min_tokens": 900, "max_tokens": 900},
    ) as running:  # fmt: skip
        next(running.iter_lines())
        refused = httpx.post(f"{tiny.root}{CHAT}", json=said("x") | {"n": 16})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert httpx.post(f"{tiny.root}{CHAT}", json=said("x") | {"n": 2}, timeout=60).status_code == 200


def test_first_choices_come_first_and_further_ones_in_turn() -> None:
    async def order() -> list[str]:
        queue, begun = FairQueue(4), []
        gate = asyncio.Event()

        async def run(name: str, choice: int) -> None:
            async with queue.place(choice):
                begun.append(f"{name}{choice}")
                await gate.wait()

        tasks = [asyncio.ensure_future(run("a", choice)) for choice in range(5)]
        await asyncio.sleep(0)
        assert begun == ["a0", "a1", "a2"], "a quarter of the places is left free"
        tasks += [asyncio.ensure_future(run("b", choice)) for choice in range(3)]
        await asyncio.sleep(0)
        assert begun[3:] == ["b0"]
        gone = asyncio.ensure_future(run("c", 0))
        await asyncio.sleep(0)
        gone.cancel()
        gate.set()
        await asyncio.gather(*tasks)
        return begun[4:]

    assert asyncio.run(order()) == ["b1", "b2", "a3", "a4"]


def test_idle_connections_make_room(tiny: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is idle longest goes, and others are answered."""
    monkeypatch.setattr("nano_coder.serve.access.resource.getrlimit", lambda _: (40, 40))
    address = ("127.0.0.1", int(tiny.root.rpartition(":")[2]))
    held = [socket.create_connection(address) for _ in range(60)]
    assert httpx.get(f"{tiny.root}/health", timeout=10).status_code == 200
    held[0].settimeout(10)
    assert held[0].recv(1) == b"", "it was closed"
    held[-1].settimeout(0.2)
    with pytest.raises(TimeoutError):
        held[-1].recv(1)
    for each in held:
        each.close()
    assert BoundedConnection.is_idle
