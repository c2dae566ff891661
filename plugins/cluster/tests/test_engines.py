"""Rollouts on servers: ids in and out, adapters that follow the trainer, servers that fail or lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_server import KEY, EngineServer, Liar
from looping import CONFIG, Loop, alternating, tiny_model
from pydantic import ValidationError

from nano_cluster import engine_pool
from nano_rl.config import TrainConfig
from nano_rl.learn.metrics import read_metrics
from nano_rl.training_record import read_events, read_used
from nano_shared.errors import PolicyError, UsageError
from nano_shared.store import LogStore

# a server imports all of torch: on a machine that is busy with other things that takes a minute
pytestmark = pytest.mark.timeout(900)
LORA = CONFIG.model_copy(update={"lora_rank": 4})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    served = EngineServer(tiny, tmp_path_factory.mktemp("server"))
    served.start()
    served.wait()
    yield served
    served.kill()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setenv("NANO_ENGINE_KEY", KEY)


@pytest.fixture
def liar(server: EngineServer) -> Iterator[Liar]:
    between = Liar(server.url)
    yield between
    between.close()


def on(*urls: str, **changed: Any) -> TrainConfig:
    return LORA.model_copy(update={"engine": urls, **changed})


def rows(loop: Loop) -> list[dict[str, float]]:
    return read_metrics(loop.folder / "metrics.jsonl")


def events(loop: Loop) -> str:
    return "\n".join(event.text for event in read_events(loop.folder))


def test_a_training_whose_rollouts_a_server_makes(tiny: Path, server: EngineServer, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path / "loop")
    held: list[set[str]] = []
    loop.go(on(server.url), on_step=lambda *_: held.append(set(server.models()[1:])))
    assert len(rows(loop)) == CONFIG.steps
    for row in rows(loop):
        assert row["engines_ready"] == 1
        assert 0 <= row["engine_mismatch_max"] <= 1e-4
        assert row["skipped"] or 0 <= row["mismatch_max"] <= 1e-4
        assert row["staleness"] == row["stale_tokens"] == 0
    assert all(len(names) == 1 for names in held), "the adapter before is unloaded"
    assert len(set.union(*held)) == len(held), "each version has a name of its own"
    assert server.models()[1:] == [], "the last one too"
    with LogStore.open(loop.folder / "log.db") as store:
        versions = {
            turn.completion.policy_version for one in store.runs() for turn in store.get(one.id).turns
        }
    assert versions == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_second_attempts_are_made_on_the_server_too(
    ahead: bool, tiny: Path, server: EngineServer, tmp_path: Path
) -> None:
    loop = Loop(tiny, tmp_path / "loop")
    loop.go(on(server.url, reflect=2, asynchronous=ahead), score=lambda _: 0.0)
    for row in rows(loop):
        assert row["graded/all"] == 4
        assert row["graded/second"] == row["rollouts"] - 4 > 0


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ("no tokens", "gave no token ids or log-probs"),
        ("wrong ids", "log-probs of what it sampled and then scored differ|ends no turn"),
        ("rendered anew", "read other ids than it was sent"),
        ("other log-probs", "log-probs of a fixed row .* differ by 0.00"),
    ],
)
def test_a_server_that_answers_wrongly_is_named(
    mode: str, sentence: str, tiny: Path, liar: Liar, tmp_path: Path
) -> None:
    liar.mode = mode
    with pytest.raises(PolicyError, match=f"no engine is ready: {liar.url}.*({sentence})"):
        Loop(tiny, tmp_path / "loop").go(on(liar.url), steps=1)


@pytest.mark.slow
def test_a_server_that_lies_about_its_version_is_left_out(
    tiny: Path, server: EngineServer, liar: Liar, tmp_path: Path
) -> None:
    liar.mode = "stale"
    loop = Loop(tiny, tmp_path / "loop")
    loop.go(on(liar.url, server.url), score=alternating())
    ready = [row["engines_ready"] for row in rows(loop)]  # 2 until an update has moved the weights
    assert (ready[0], ready[-1]) == (2, 1)
    assert f"left out: {liar.url}" in events(loop)
    assert [row["mismatch_max"] <= 1e-4 for row in rows(loop)] == [True] * 3


def test_a_request_leaves_no_setting_of_sampling_to_the_server(
    tiny: Path, liar: Liar, tmp_path: Path
) -> None:
    """vLLM takes those that a request lacks from the model's generation_config.json, and its log-probs show
    none of them."""
    asked: list[dict[str, Any]] = []
    liar.hook = lambda body: asked.append(body) if body.get("max_tokens") else None
    Loop(tiny, tmp_path / "loop").go(on(liar.url), steps=1)
    neutral = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    assert asked
    assert all(neutral.items() <= body.items() for body in asked)


@pytest.mark.slow
def test_a_server_that_does_not_answer_holds_nobody_up(
    tiny: Path, server: EngineServer, liar: Liar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "SYNC_SECONDS", 5.0)

    def hang(*_: object) -> None:
        liar.hook = lambda body: time.sleep(15.0) if "prompt" in body else None

    loop = Loop(tiny, tmp_path / "loop")
    loop.go(on(liar.url, server.url), steps=2, on_step=hang)
    assert [(row["engines_ready"], row["engines_out"]) for row in rows(loop)] == [(2, 0), (1, 1)]
    assert f"left out: {liar.url}" in events(loop)


@pytest.mark.slow
def test_a_server_that_freezes_is_left_out_and_taken_back(
    tiny: Path, server: EngineServer, liar: Liar, tmp_path: Path
) -> None:
    """Its connections stay open, so nothing but its silence tells that no answer will come."""
    loop = Loop(tiny, tmp_path / "loop")

    def freeze(body: dict[str, Any]) -> None:
        if "seed" in body and len(rows(loop)) == 1:  # of a rollout; a probe has none
            liar.thawed.clear()

    def thaw(done: int, *_: object) -> None:
        if done == 2:
            liar.thawed.set()

    liar.hook = freeze
    loop.go(on(liar.url, server.url), steps=3, on_step=thaw)
    assert [row["engines_out"] for row in rows(loop)] == [0, 1, 0]
    assert f"{liar.url} answers nothing any more" in events(loop)
    assert f"{liar.url} is ready with" in events(loop)


def test_a_probe_of_vllm_runs_alone() -> None:
    """It waits for the requests in flight, and those that come meanwhile wait for it."""
    probe: Any = None
    pool = engine_pool.EnginePool(["http://127.0.0.1:9/v1"], probe)
    (engine,) = pool._engines
    first_runs, first_ends, second_runs = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with pool._running(engine, "a"):
            first_runs.set()
            first_ends.wait()
            order.append("first")

    def probing() -> None:
        with pool._alone(engine):
            assert not second_runs.wait(0.2)
            order.append("probe")

    def second() -> None:
        with pool._running(engine, "a"):
            second_runs.set()
            order.append("second")

    threads = [threading.Thread(target=part) for part in (first, probing, second)]
    threads[0].start()
    first_runs.wait()
    threads[1].start()
    while not engine.held:
        time.sleep(0.001)
    threads[2].start()
    first_ends.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "probe", "second"]


@pytest.mark.slow
def test_an_update_below_the_bound_does_not_hide_stale_weights(
    tiny: Path, liar: Liar, tmp_path: Path
) -> None:
    liar.mode = "stale"
    wide = CONFIG.guards.model_copy(update={"mismatch_max": 5.0})
    with pytest.raises(PolicyError, match="serves the weights before nano-"):
        Loop(tiny, tmp_path / "loop").go(on(liar.url, guards=wide), score=alternating())


@pytest.mark.slow
def test_a_server_killed_in_a_step_comes_back_with_old_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds none but the base then, and would answer for any name."""
    server, loop = EngineServer(tiny, tmp_path), Loop(tiny, tmp_path / "loop")
    server.start()
    server.wait()
    between = Liar(server.url)
    sampled: list[str] = []

    def kill(body: dict[str, Any]) -> None:
        if body.get("max_tokens", 0) > 0:
            sampled.append(body["model"])
        if len(set(sampled)) == 2 and sampled.count(sampled[-1]) == 3:  # in step 1
            sampled.append("killed")
            server.kill()
            threading.Timer(0.5, server.start).start()

    between.hook = kill
    try:
        monkeypatch.setattr(engine_pool, "PATIENCE_SECONDS", 240.0)
        loop.go(on(between.url), score=alternating())
    finally:
        between.close()
        server.kill()
    assert "killed" in sampled
    assert len(rows(loop)) == CONFIG.steps
    assert "left out" in events(loop)
    assert "is ready with nano-" in events(loop)
    assert sum(row["engine_retries"] for row in rows(loop)) > 0
    assert all(row["mismatch_max"] <= 1e-4 for row in rows(loop))


def test_what_cannot_be_rolled_out_on_servers(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--lora-rank 16"):
        Loop(tiny, tmp_path / "whole").go(on("http://127.0.0.1:9/v1", lora_rank=0))
    with pytest.raises(PolicyError, match=r"no engine is ready: http://127\.0\.0\.1:9/v1.*is it up"):
        Loop(tiny, tmp_path / "down").go(on("http://127.0.0.1:9/v1"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "gpu1:8000"}, "is no URL"),
        ({"engine": "http://a/v1", "group_size": 0}, "group_size = 0 rolls out none"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainConfig.model_validate(settings)


def test_urls_are_separated_by_commas() -> None:
    assert TrainConfig(engine=("http://a/v1/, http://b/v1", "http://a/v1")).engine == (
        "http://a/v1", "http://b/v1",
    )  # fmt: skip


class Aborted(Exception):
    """Stands for what ends a training between two steps."""


@pytest.mark.slow
def test_rollouts_ahead_on_a_server(tiny: Path, server: EngineServer, tmp_path: Path) -> None:
    """Ended once on the way, and gone on with."""
    loop, bound = Loop(tiny, tmp_path / "loop"), 2
    ahead = on(
        server.url, asynchronous=True, steps=7,
        objective=CONFIG.objective.model_copy(update={"max_staleness": bound}),
    )  # fmt: skip

    def abort(step: int, *_: object) -> None:
        if step == 3:
            raise Aborted

    with pytest.raises(Aborted):
        loop.go(ahead, score=alternating(), on_step=abort)
    loop.go(ahead, score=alternating())
    used = read_used(loop.folder / "used.jsonl")
    assert [line["step"] for line in used] == list(range(7))
    trained = [run for line in used for group in line["groups"] for run in group["runs"]]
    assert len(trained) == len(set(trained)) == 7 * 4, "each run once"
    assert max(row["staleness_max"] for row in rows(loop)) == bound
    assert all(row["staleness_max"] <= bound and row["stale_dropped"] == 0 for row in rows(loop))
    assert any(row["stale_tokens"] > 0 for row in rows(loop))
    with LogStore.open(loop.folder / "log.db") as store:
        for number, line in enumerate(used):
            for run in (store.get(name) for group in line["groups"] for name in group["runs"]):
                versions = [turn.completion.policy_version for turn in run.turns]
                assert versions == sorted(versions)
                assert number - bound <= versions[0] <= versions[-1] <= number
