"""Rollouts by Ray actors: each job has one run that counts, whatever becomes of its workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_server import KEY, EngineServer
from looping import CONFIG, TASKS, Loop, alternating, runtime_at, tiny_model
from pydantic import ValidationError
from ray_policies import ByTurn, open_by_turn

from nano_cluster import ray_worker
from nano_cluster.engine_pool import EnginePool, EngineState
from nano_cluster.ray_cluster import connect
from nano_cluster.ray_rollouts import RayRollouts
from nano_cluster.ray_setup import setup_of
from nano_cluster.ray_worker import Redo, RolloutExecutor, RolloutJob, WorkerFacts, WorkerFailure
from nano_cluster.worker_status import WORKERS, ClusterStatus, read_status
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.config import AgentConfig
from nano_coder.run.execution import Runtime, run_task
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import member_seed, oracle_policy
from nano_rl.learn.metrics import read_metrics
from nano_rl.tasks.task_file import write_tasks
from nano_rl.training_record import read_events, read_used
from nano_shared.errors import ConfigError, LogError, RolloutsFailed, UsageError
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import Role, Sampling, Split, StopReason
from nano_suites.drawing import make_tasks

HERE = Path(__file__).parent
(EDIT, *_) = (t for t in make_tasks(levels=[1], n=20, seed=1, split=Split.TRAIN) if "edit_file" in t.tools)
TASK = EDIT.model_copy(update={"limits": EDIT.limits.model_copy(update={"max_turns": 8})})


def texts() -> tuple[str, ...]:
    """The solution, an edit and `submit`, with the edit made three times: four turns."""
    solution: Any = oracle_policy(TASK, COMPACT_1)
    return (solution._texts[0], solution._texts[0], *solution._texts)


def job(**changed: Any) -> RolloutJob:
    given = {"run": new_run_id(), "task": TASK, "seed": 7, "sampling": Sampling(max_tokens=8)}
    return RolloutJob(**{**given, **changed})


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    made = replace(runtime_at(tmp_path / "log.db"), policy=ByTurn(texts()))
    with made.store:
        yield made


@pytest.fixture
def worker(runtime: Runtime) -> RolloutExecutor:
    made = RolloutExecutor()
    opened = made.open(setup_of(runtime, partial(open_by_turn, texts(), None), AgentConfig()))
    assert isinstance(opened, WorkerFacts), opened
    return made


class Interrupted(ByTurn):
    """Its process ends, so to speak, at the third turn."""

    def complete(self, conversation: Any, sampling: Sampling) -> Any:
        if sum(message.role is Role.ASSISTANT for message in conversation.messages) == 2:
            raise SystemExit
        return super().complete(conversation, sampling)


def begun(runtime: Runtime) -> RolloutJob:
    """A job that a worker has begun and not ended, two turns long."""
    lost = job(begun=True)
    with pytest.raises(SystemExit):
        run_task(TASK, replace(runtime, policy=Interrupted(texts())), seed=lost.seed, run_id=lost.run)
    assert len(runtime.store.get(lost.run).turns) == 2
    return lost


# ------------------------------------------------------------------------------ one job, several workers


def test_a_job_is_run_under_the_id_that_it_brings_and_graded(
    runtime: Runtime, worker: RolloutExecutor
) -> None:
    asked = job()
    assert worker.run(asked) == asked.run
    run = runtime.store.get(asked.run)
    assert (run.seed, run.stop, run.verdict and run.verdict.reward) == (7, StopReason.FINISHED, 1.0)
    assert len(run.turns) == len(texts()) == 4


def test_a_job_that_was_lost_before_it_began_is_run(runtime: Runtime, worker: RolloutExecutor) -> None:
    lost = job(begun=True)
    assert worker.run(lost) == lost.run
    assert len(runtime.store.runs()) == 1


def test_a_run_of_a_lost_worker_is_gone_on_with(runtime: Runtime, worker: RolloutExecutor) -> None:
    lost = begun(runtime)
    before = runtime.store.get(lost.run).turns
    assert worker.run(lost) == lost.run
    run = runtime.store.get(lost.run)
    assert run.turns[:2] == before
    assert run.verdict is not None
    assert run.verdict.reward == 1.0
    assert len(runtime.store.runs()) == 1


def test_a_run_that_was_ended_and_not_graded_is_graded(runtime: Runtime, worker: RolloutExecutor) -> None:
    lost = job(begun=True)
    ended = run_task(TASK, runtime, seed=7, run_id=lost.run)
    assert worker.run(lost) == lost.run
    run = runtime.store.get(lost.run)
    assert (run.turns, run.verdict and run.verdict.reward) == (ended.turns, 1.0)


def test_a_run_that_was_graded_is_taken_as_it_is(runtime: Runtime, worker: RolloutExecutor) -> None:
    done = job()
    worker.run(done)
    worker.run(replace(done, begun=True))
    assert len(runtime.store.verdicts(done.run)) == 1


def test_a_run_that_a_hanging_worker_holds_is_ended_in_the_log_and_rolled_out_again(
    runtime: Runtime, worker: RolloutExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "CLAIM_SECONDS", 0.0)
    lost = begun(runtime)
    turn = runtime.store.get(lost.run).turns[-1]
    with runtime.store.claim(lost.run):
        answer = worker.run(lost)
    assert isinstance(answer, Redo)
    assert "is being executed by another process" in answer.why
    assert runtime.store.get(lost.run).stop is StopReason.INTERRUPTED
    with pytest.raises(LogError, match="has ended"):
        runtime.store.append_turn(lost.run, turn.model_copy(update={"index": 2}))


def test_a_run_that_a_hanging_worker_holds_before_its_first_write_is_rolled_out_again(
    runtime: Runtime, worker: RolloutExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "CLAIM_SECONDS", 0.0)
    lost = job(begun=True)
    with runtime.store.claim(lost.run):
        answer = worker.run(lost)
    assert isinstance(answer, Redo)
    assert "is being executed by another process" in answer.why
    assert runtime.store.get(lost.run).stop is StopReason.INTERRUPTED
    with pytest.raises(LogError):  # the hanging worker goes on
        run_task(TASK, runtime, seed=lost.seed, run_id=lost.run)
    assert len(runtime.store.runs()) == 1


@pytest.mark.slow
def test_a_worker_that_cannot_write_the_trainers_log_says_so(runtime: Runtime, tmp_path: Path) -> None:
    setup = setup_of(runtime, partial(open_by_turn, texts(), None), AgentConfig())
    other = LogStore.open(tmp_path / "other" / "log.db")
    for changed, sentence in (
        ({"machine": "another"}, "an SQLite file, which a worker on another machine cannot write"),
        ({"blobs": other.blobs.address}, "are not the trainer's there"),
        ({"version": "0.0.1"}, "the trainer is 0.0.1: install the same"),
        ({"log": "postgresql://nano@127.0.0.1:1/none", "machine": "another"}, "127.0.0.1"),
    ):
        refused = RolloutExecutor().open(replace(setup, **changed))
        assert isinstance(refused, WorkerFailure)
        assert sentence in refused.message
        assert refused.exit_code == 2
    other.close()


def test_a_pool_takes_over_what_the_trainers_has_found() -> None:
    pool = EnginePool(["http://a/v1", "http://b/v1"], probe=None)  # type: ignore[arg-type]
    ready = EngineState(problem=None, seeded=True, context_limit=256, fingerprint="x")
    out = replace(ready, problem="does not answer", context_limit=8)
    old, new = (replace_adapter(name) for name in ("nano-old", "nano-new"))
    assert pool.adopt(old, [ready, out]) == set()
    assert (pool.context_limit, pool.metrics()["engines_out"]) == (256, 1)
    with pool._running(pool._engines[0], "nano-old"):
        assert pool.adopt(new, [ready, ready]) == {"nano-old"}
    assert pool.adopt(new, [ready, ready]) == set()


def replace_adapter(name: str) -> Any:
    from nano_cluster.engine_pool import PublishedAdapter

    return PublishedAdapter(
        name=name, folder=Path(name), content=name, version=0, row=(1, 2), expected=(-1.0,)
    )


# ----------------------------------------------------------------------------------- settings and status


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ray": "auto"}, "whose tokens come from servers: give --engine URL"),
        ({"engine": "http://a/v1", "rollout_workers": 3}, "give --ray auto"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainConfig.model_validate(settings)


def test_an_address_without_a_cluster_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address, sentence in (
        (f"127.0.0.1:{port}", f"answers at 127.0.0.1:{port} .*; ray start --head starts one"),
        ("ray://head:10001", "a client's address; give HOST:PORT"),
        ("head", "no cluster of Ray"),
    ):
        with pytest.raises(UsageError, match=sentence):
            connect(address)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="nano-rl-coder"):
        connect("auto")


def nano_rl(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NANO_HOME": str(home), "NANO_ENGINE_KEY": KEY, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "nano_rl", *arguments], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_status_of_workers_is_read_without_ray(tmp_path: Path) -> None:
    folder = tmp_path / "trainings" / "far"
    folder.mkdir(parents=True)
    assert read_status(folder) is None
    told = ClusterStatus(
        cluster="auto", queued=3, done=5, repeated=1, replaced=1, version=2,
        workers=({"number": 2, "host": "gpu1", "pid": 9, "opened": True, "running": 4, "done": 5,
                  "current": True, "idle": 0.25, "silent_seconds": 0.5, "memory_mb": 300.0},),
        lost=({"number": 1, "host": "gpu2", "pid": 8, "why": "was silent for 60 seconds"},),
    )  # fmt: skip
    told.write(folder / WORKERS)
    done = nano_rl("cluster", "status", "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)["far"]
    assert (read["queued"], read["workers"][0]["idle"], read["stale"]) == (3, 0.25, False)
    text = nano_rl("cluster", "status", home=tmp_path).stdout
    assert "far: 1 of 1 workers on Ray auto, 1 replaced; 3 runs queued, 4 running" in text
    assert "lost: worker 1 on gpu2: was silent for 60 seconds" in text
    told.model_copy(update={"written": time.time() - 100}).write(folder / WORKERS)
    assert "has ended, or hangs" in nano_rl("cluster", "status", "far", home=tmp_path).stdout
    missing = nano_rl("cluster", "status", "near", home=tmp_path)
    assert (missing.returncode, "has no Ray workers now" in missing.stderr) == (2, True)


# ------------------------------------------------------------------------------------ on a real cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this machine, whose workers find the modules of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        disconnect = connect("auto")
        yield
        disconnect()


def rollouts(runtime: Runtime, kills: Path | None = None, **options: Any) -> RayRollouts:
    setup = setup_of(runtime, partial(open_by_turn, texts(), kills), AgentConfig())
    return RayRollouts(setup, "auto", **{"workers": 1, "follows": False, "patience": 120.0, **options})


def each_once(runtime: Runtime, returned: list[str], jobs: int) -> None:
    """A run for each job, with its own seed, finished and graded; none beside them counts."""
    assert len(set(returned)) == len(returned) == jobs
    logged = [runtime.store.get(each.id) for each in runtime.store.runs()]
    count = [run for run in logged if run.stop not in (None, StopReason.INTERRUPTED)]
    assert sorted(run.id for run in count) == sorted(returned)
    assert all(run.verdict is not None and run.verdict.reward == 1.0 for run in count)
    assert {run.seed for run in count} == {member_seed(3, TASK, member) for member in range(jobs)}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_workers_that_die_or_hang_are_replaced_and_each_run_is_in_the_log_once(
    runtime: Runtime, tmp_path: Path
) -> None:
    kills = tmp_path / "kills"
    kills.mkdir()
    for name in ("kill-1", "kill-2", "hang"):
        (kills / name).touch()
    events: list[str] = []
    status = tmp_path / WORKERS
    workers = rollouts(runtime, kills, workers=2, patience=20.0, status=status, on_change=events.append)
    try:
        runs = workers.collect([TASK], runtime, group_size=12, seed=3)
        assert list(kills.iterdir()) == []
        assert workers.replaced == 3
        text = "\n".join(events)
        assert text.count("The actor is dead because its worker process has died") == 2
        assert text.count("was silent for 20 seconds") == 1
        assert socket.gethostname() in text
        assert read_status(tmp_path) is not None
        assert workers.metrics()["runs_repeated"] >= 3
    finally:
        workers.close()
    each_once(runtime, [run.id for run in runs], 12)
    assert not status.exists()
    with pytest.raises(RolloutsFailed, match="have ended"):
        workers.collect([TASK], runtime)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_worker_has_a_bounded_number_of_runs_and_an_error_of_ours_is_told(
    runtime: Runtime, tmp_path: Path
) -> None:
    most, ended = [0], threading.Event()
    workers = rollouts(runtime)

    def watch() -> None:
        while not ended.wait(0.02):
            most.append(max((each.running for each in workers.status().workers), default=0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        runs = workers.collect([TASK], runtime, group_size=24, seed=3)
        foreign = TASK.model_copy(update={"network": "allow=example.org"})
        with pytest.raises(RolloutsFailed, match=r"rollout worker 1 on .*--net") as refused:
            workers.collect([foreign], runtime)
        assert refused.value.exit_code == 2
        assert len(workers.collect([TASK], runtime)) == 1, "it goes on with others"
    finally:
        ended.set()
        thread.join()
        workers.close()
    assert max(most) == 4
    assert len(runs) == 24


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_task_that_kills_every_worker_is_given_up(runtime: Runtime, tmp_path: Path) -> None:
    kills = tmp_path / "kills"
    kills.mkdir()
    for number in range(9):
        (kills / f"kill-{number}").touch()
    workers = rollouts(runtime, kills)
    try:
        with pytest.raises(RolloutsFailed, match=r"lost 6 workers: rollout worker 1 on .*; rollout worker 2"):
            workers.collect([TASK], runtime, seed=3)
    finally:
        workers.close()


# ----------------------------------------------------------------------------------------- a training


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


def kill_a_worker(folder: Path) -> Callable[..., None]:
    """Called after each step: kills a worker that the status names, once."""
    killed: list[int] = []

    def kill(*_: Any) -> None:
        until = time.monotonic() + 60
        while not killed and time.monotonic() < until:
            told = read_status(folder)
            if ready := [worker.pid for worker in told.workers if worker.opened] if told else []:
                killed.append(ready[0])
                os.kill(ready[0], signal.SIGKILL)
            time.sleep(0.1)

    return kill


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_training_by_workers(
    ahead: bool, tiny: Path, server: EngineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_ENGINE_KEY", KEY)
    loop = Loop(tiny, tmp_path / "loop")
    objective = CONFIG.objective.model_copy(update={"max_staleness": 2})
    loop.go(
        CONFIG.model_copy(update={"lora_rank": 4, "engine": (server.url,)}),
        ray="auto", rollout_workers=2, asynchronous=ahead, steps=5, objective=objective,
        score=alternating(), on_step=kill_a_worker(loop.folder),
    )  # fmt: skip
    rows = read_metrics(loop.folder / "metrics.jsonl")
    assert len(rows) == 5
    if not ahead:  # older tokens differ by what was learned since
        assert all(row["skipped"] or row["mismatch_max"] <= 1e-4 for row in rows)
    assert all(row["staleness_max"] <= (2 if ahead else 0) for row in rows)
    assert sum(row["worker_restarts"] for row in rows) == 1
    assert any("another one takes its place" in event.text for event in read_events(loop.folder))
    used = [
        run for line in read_used(loop.folder / "used.jsonl") for g in line["groups"] for run in g["runs"]
    ]
    assert len(used) == len(set(used)) == 20
    assert server.models()[1:] == [], "the adapters are unloaded"
    with LogStore.open(loop.folder / "log.db") as store:
        counted = [r.id for r in store.runs() if r.stop not in (None, StopReason.INTERRUPTED)]
        versions = {t.completion.policy_version for run in used for t in store.get(run).turns}
    assert sorted(counted) == sorted(used), "each run that counts was trained once"
    assert versions >= {0, 1, 2}


@pytest.mark.slow
def test_the_commands_start_a_cluster_of_their_own(tiny: Path, server: EngineServer, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, list(TASKS[:2]))
    model = ("--model", f"openai:{server.models()[0]}", "--base-url", server.url)
    rolled = nano_rl(
        "rollout", "--tasks", str(tasks), "--group-size", "2", "--ray", "auto", "--rollout-workers", "1",
        "--set", f"api_key={KEY}", "--json", *model, home=tmp_path / "rolled",
    )  # fmt: skip
    assert rolled.returncode == 0, rolled.stderr
    assert len(json.loads(rolled.stdout)["runs"]) == 4
    trained = nano_rl(
        "train", "--name", "far", "--model", str(tiny), "--tasks", str(tasks), "--lora-rank", "4",
        "--engine", server.url, "--ray", "auto", "--rollout-workers", "1", "--steps", "1", "--prompts", "1",
        "--group-size", "2", "--json", home=tmp_path / "trained",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["steps"] == 1
    refused = nano_rl("rollout", "--tasks", str(tasks), "--ray", "auto", "--model", str(tiny), home=tmp_path)
    assert refused.returncode == 2
    assert "on a hosted model" in refused.stderr
