"""The log store: written ahead, append-only, and exact."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from log_values import a_run, a_turn, a_verdict, trajectories

from nano_shared.errors import LogError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import StopReason, Task

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture
def store(tmp_path: Path):
    with LogStore.open(tmp_path / "log.db") as opened:
        yield opened


def script(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """A Python process that can import this folder's builders."""
    path = os.pathsep.join([str(HERE), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


# ------------------------------------------------------------------------------------ exactness


@given(trajectory=trajectories())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_trajectory_comes_back_equal(store, trajectory):
    unique = trajectory.model_copy(update={"id": trajectory.id + new_run_id()})
    store.append(unique)
    assert store.get(unique.id) == unique


@given(trajectory=trajectories())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_written_ahead_equals_appended_whole(store, trajectory):
    run_id = new_run_id()
    began = {"id": run_id, "turns": (), "stop": None, "verdict": None, "stop_detail": None}
    began |= {"answer": None, "diff": "", "ended": None}
    store.begin(trajectory.model_copy(update=began))
    for turn in trajectory.turns:
        store.append_turn(run_id, turn)
    end = {"stop": StopReason.FINISHED, "answer": trajectory.answer, "diff": trajectory.diff, "ended": 9.0}
    store.finish(run_id, stop_detail=trajectory.stop_detail, **end)
    expected = trajectory.model_copy(update={"id": run_id, "verdict": None} | end)
    assert store.get(run_id) == expected


def test_every_prefix_of_a_run_can_be_read(store):
    store.begin(a_run())
    for index in range(3):
        assert len(store.get("run1").turns) == index
        store.append_turn("run1", a_turn(index))
    assert store.get("run1").turns == tuple(a_turn(index) for index in range(3))
    assert store.get("run1").stop is None


def test_a_task_is_stored_once(store):
    for name in ("run1", "run2"):
        store.begin(a_run(name))
    assert store.sql("SELECT count(*), count(DISTINCT task_id) FROM runs").rows == [(2, 1)]
    assert store.sql("SELECT count(*) FROM log_tasks").rows == [(1,)]


# ------------------------------------------------------------------------------------ append-only


def test_an_id_is_taken_once(store):
    store.begin(a_run())
    with pytest.raises(LogError, match="run1 is already in the log"):
        store.begin(a_run())


def test_begin_refuses_an_executed_run(store):
    with pytest.raises(LogError, match=r"append\(\)"):
        store.begin(a_run(turns=(a_turn(),)))


@pytest.mark.parametrize("index", [0, 2])
def test_turns_come_in_order(store, index):
    store.begin(a_run())
    store.append_turn("run1", a_turn(0))
    with pytest.raises(LogError, match=f"holds 1 turns, so turn {index}"):
        store.append_turn("run1", a_turn(index))


def test_of_many_writers_of_one_turn_one_is_taken_and_the_others_are_refused(store):
    """Also on a server, which counts the turns of a run before it waits for the lock on it."""
    store.begin(a_run())
    together = threading.Barrier(6)

    def write(turn: int) -> int:
        together.wait()
        try:
            store.append_turn("run1", a_turn(turn))
        except LogError:
            return 0
        return 1

    with ThreadPoolExecutor(6) as threads:
        for index in range(12):
            assert sum(threads.map(write, [index] * 6)) == 1
    assert [turn.index for turn in store.get("run1").turns] == list(range(12))


def test_an_ended_run_takes_no_turns_and_no_second_end(store):
    store.begin(a_run())
    store.finish("run1", stop=StopReason.FINISHED, ended=2.0)
    with pytest.raises(LogError, match="has ended with 'finished'"):
        store.append_turn("run1", a_turn(0))
    with pytest.raises(LogError, match="has ended with 'finished'"):
        store.finish("run1", stop=StopReason.GAVE_UP, ended=3.0)


def test_a_refused_append_leaves_nothing(store):
    with pytest.raises(LogError):
        store.append(a_run(turns=(a_turn(0), a_turn(5))))
    assert store.runs() == []


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.append_turn("nobody", a_turn()),
        lambda store: store.finish("nobody", stop=StopReason.FINISHED, ended=1.0),
        lambda store: store.reopen("nobody"),
        lambda store: store.add_verdict("nobody", a_verdict()),
        lambda store: store.add_feedback("nobody", Feedback(kind=FeedbackKind.ACCEPT, created=1.0)),
        lambda store: store.get("nobody"),
    ],
)
def test_an_unknown_run_is_named(store, write):
    with pytest.raises(LogError, match=r"no run 'nobody'.*nano-coder log list"):
        write(store)


@pytest.mark.parametrize("stop", [None, StopReason.INTERRUPTED, StopReason.POLICY_ERROR])
def test_reopen_clears_an_end_that_is_no_result(store, stop):
    store.append(a_run(turns=(a_turn(0),), stop=stop, stop_detail="x", diff="d", ended=5.0))
    store.reopen("run1")
    assert store.get("run1") == a_run(turns=(a_turn(0),))
    store.append_turn("run1", a_turn(1))


@pytest.mark.parametrize("stop", [StopReason.FINISHED, StopReason.MAX_TURNS])
def test_reopen_refuses_a_result(store, stop):
    store.append(a_run(stop=stop))
    with pytest.raises(LogError, match=f"ended with '{stop.value}'"):
        store.reopen("run1")


def test_the_newest_verdict_is_the_trajectorys(store):
    store.begin(a_run())
    graded = [a_verdict(0.0), a_verdict(None, "cases/2"), a_verdict(1.0, "judge/1")]
    for verdict in graded:
        store.add_verdict("run1", verdict)
    assert store.get("run1").verdict == graded[-1]
    assert store.verdicts("run1") == tuple(graded)


def test_feedback_comes_back(store):
    store.begin(a_run())
    said = (
        Feedback(kind=FeedbackKind.THUMB, value=-1.0, created=1.0),
        Feedback(kind=FeedbackKind.EDIT, text="better", turn=0, span=(2, 5), author="me", created=2.0),
    )
    for feedback in said:
        store.add_feedback("run1", feedback)
    assert store.feedback("run1") == said


def test_blobs_lie_beside_the_log(store, tmp_path):
    blob = store.put_blob(b"output")
    assert store.get_blob(blob) == b"output"
    assert store.blobs.root == tmp_path / "blobs"


# ------------------------------------------------------------------------------------ reading


def test_a_unique_prefix_is_enough(store):
    for name in ("abc1", "abd2", "ab"):
        store.begin(a_run(name))
    assert store.get("abc").id == "abc1"
    assert store.get("ab").id == "ab"
    with pytest.raises(LogError, match="'a' is ambiguous: it begins ab, abc1, abd2"):
        store.get("a")
    with pytest.raises(LogError, match="no run ''"):
        store.get("")
    with pytest.raises(LogError, match="no run 'a%'"):
        store.get("a%")


def test_last_is_the_newest(store):
    with pytest.raises(LogError, match="holds no runs"):
        store.get("last")
    for name, started in (("b", 1.0), ("c", 3.0), ("a", 2.0)):
        store.begin(a_run(name, started=started))
    assert store.get("last").id == "c"


def test_trajectories_are_filtered_and_newest_last(store):
    store.append(a_run("r1", started=1.0, turns=(a_turn(),)))
    store.append(a_run("r2", started=2.0, task=Task(key="other", prompt="p")))
    store.append(a_run("r3", started=3.0, policy="scripted"))
    assert [run.id for run in store.trajectories()] == ["r1", "r2", "r3"]
    assert [run.id for run in store.trajectories(policy="scripted")] == ["r3"]
    assert [run.id for run in store.trajectories(policy="weights")] == ["r1"]


def test_trajectories_can_be_written_to_while_they_are_read(store):
    for name in ("r1", "r2"):
        store.begin(a_run(name))
    for trajectory in store.trajectories():
        store.append_turn(trajectory.id, a_turn())
    assert [len(trajectory.turns) for trajectory in store.trajectories()] == [1, 1]


def test_runs_are_summaries(store):
    store.append(a_run("r1", started=1.0, turns=(a_turn(0), a_turn(1)), verdict=a_verdict(0.5)))
    store.append(a_run("r2", started=2.0, turns=(a_turn(0, tokens=False),), stop=StopReason.FINISHED))
    store.begin(a_run("r3", started=3.0, task=Task(key="\udc80", prompt="nul\0")))
    first, second, third = store.runs()
    assert (first.id, first.turns, first.sampled_tokens, first.trainable) == ("r1", 2, 4, True)
    assert (first.policy_id, first.reward, first.task_key, first.stop) == ("weights", 0.5, "sum", None)
    assert (second.sampled_tokens, second.trainable, second.stop) == (0, False, StopReason.FINISHED)
    assert (third.turns, third.trainable, third.task_key, third.prompt) == (0, False, "\udc80", "nul\0")
    assert [run.id for run in store.runs(limit=2)] == ["r2", "r3"]


def test_sql_gives_columns_and_rows(store):
    store.begin(a_run())
    result = store.sql("SELECT id, task_key AS task FROM runs WHERE started < 2")
    assert result.columns == ("id", "task")
    assert result.rows == [("run1", "sum")]


@pytest.mark.some(6)
@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM log_runs",
        "ATTACH '{folder}/other.db' AS other",
        "VACUUM INTO '{folder}/other.db'",
        "PRAGMA query_only=0",
        "SELECT 1; DELETE FROM log_runs",
        "CREATE TABLE mine (x)",
        "SELEKT",
        "SELECT * FROM nothing",
    ],
)
def test_sql_only_reads(store, tmp_path, query):
    store.begin(a_run())
    with pytest.raises(LogError, match="the query was"):
        store.sql(query.format(folder=tmp_path))
    assert store.get("last").id == "run1"
    assert not (tmp_path / "other.db").exists()


# ------------------------------------------------------------------------------------ ids and claims


def test_run_ids_sort_by_time():
    ids = [new_run_id() for _ in range(50)]
    assert all(len(run_id) == 16 and run_id == run_id.lower() and run_id.isalnum() for run_id in ids)
    assert len(set(ids)) == 50
    times = [run_id[:9] for run_id in ids]
    assert times == sorted(times)


def test_a_claimed_run_names_its_owner(store):
    with store.claim("run1"):
        with pytest.raises(LogError, match=rf"run run1 is being executed .*pid {os.getpid()}"):
            with store.claim("run1"):
                pytest.fail("two hold one run")
        with store.claim("run2"):
            pass
    with store.claim("run1"):
        pass


def test_a_killed_process_lets_go_of_its_run(store):
    holder = script(
        "import sys; from nano_shared.store import LogStore\n"
        "with LogStore.open(sys.argv[1]).claim('run1'): print('held', flush=True); sys.stdin.read()",
        store.address,
        stdin=subprocess.PIPE,
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(LogError, match=f"pid {holder.pid}"), store.claim("run1"):
        pytest.fail("the run is another's")
    holder.kill()
    holder.communicate()
    with store.claim("run1"):
        pass


# ------------------------------------------------------------------------------------ many writers

WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from log_values import a_run, a_turn
from nano_shared.store import LogStore
store = LogStore.open(sys.argv[1])
def write(name):
    store.begin(a_run(name))
    for index in range(6):
        store.append_turn(name, a_turn(index))
with ThreadPoolExecutor(8) as pool:
    list(pool.map(write, [f"{sys.argv[2]}-{thread}" for thread in range(4)]))
"""


def test_threads_and_processes_lose_nothing(log):  # which whoever is first creates
    writers = [script(WRITER, log, name) for name in "ab"]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    with LogStore.open(log) as store:
        runs = list(store.trajectories())
    assert len(runs) == 8
    assert all(run.turns == tuple(a_turn(index) for index in range(6)) for run in runs)


def test_one_store_serves_many_threads(store):
    barrier = threading.Barrier(8)

    def write(number):
        barrier.wait()
        store.append(a_run(f"r{number}", turns=(a_turn(0), a_turn(1))))
        return store.get(f"r{number}")

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(write, range(8)))
    assert [len(run.turns) for run in runs] == [2] * 8


def test_kill_9_keeps_every_finished_turn(log):
    writer = script(
        """
import sys
from log_values import a_run, a_turn
from nano_shared.store import LogStore
store = LogStore.open(sys.argv[1])
store.begin(a_run())
for index in range(100_000):
    store.append_turn("run1", a_turn(index))
    print(index, flush=True)
""",
        log,
    )
    for _ in range(20):
        reported = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    rest, _ = writer.communicate()
    reported = max([reported, *(int(line) for line in rest.splitlines() if line)])
    with LogStore.open(log, create=False) as store:
        run = store.get("last")
        assert len(run.turns) in (reported + 1, reported + 2)
        assert run.turns == tuple(a_turn(index) for index in range(len(run.turns)))
        assert run.stop is None
        store.reopen("run1")
        store.append_turn("run1", a_turn(len(run.turns)))
