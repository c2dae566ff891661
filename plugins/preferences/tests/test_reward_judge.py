"""The judge over a real server: believed where it is sound, and None with a kind where it is not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from rewarded import ADD, FAIL, MEND, READ, SOLVE, SUBMIT, new_runtime, opened, rolled

from integration.judge_server import Behaviour, honest, judging, right, words, works
from nano_coder.run.execution import Runtime
from nano_preferences.rewards.judge import choice, ring
from nano_shared.errors import NanoError
from nano_shared.types import Trajectory, Trust

BY_HAND = f"I mend it.\n{MEND}"


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return new_runtime(tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def runs(runtime: Runtime) -> list[Trajectory]:
    """Two that pass, of which one is tidier, and one that fails."""
    untidy = (READ, READ, "@write_file path=notes.txt\nnotes", BY_HAND, SUBMIT)
    return rolled(runtime, SOLVE, untidy, FAIL)


def tidy(work: str) -> float:
    return 0.0 if "notes.txt" in work else right(work)


def judged(runtime: Runtime, runs: list[Trajectory], url: str, **settings: object) -> list[Trajectory]:
    judge = {"weight": 1.0, "url": url, "deadline": 20.0, **settings}
    return opened(tests=1, judge=judge).apply(runs, runtime)


def test_a_sound_judge_ranks_the_passes_and_never_lifts_a_failure(
    runtime: Runtime, runs: list[Trajectory]
) -> None:
    with judging(honest(tidy)) as server:
        first, second, failed = judged(runtime, runs, server.url)
    assert [first.reward, second.reward, failed.reward] == [1.0, 0.5, 0.0]
    assert first.verdict is not None
    assert first.verdict.components["judge"] == 1.0
    assert first.verdict.components["judge.swap_agreement"] == 1.0
    assert failed.verdict is not None
    assert failed.verdict.components == {"tests": 0.0, "judge": None}
    # the failure was shown to nobody: only the probe and the two passes, each in both orders
    assert all("hidden" not in q for q in server.questions)
    assert len(server.questions) == 3 * 2 + 2


def test_a_judge_that_always_takes_the_first_makes_ties(runtime: Runtime, runs: list[Trajectory]) -> None:
    with judging(lambda q: words(q)["first"]) as server:
        first, second, _ = judged(runtime, runs, server.url)
    assert first.reward == second.reward == 0.75
    assert first.verdict is not None
    assert first.verdict.components["judge.swap_agreement"] == 0.0


def gullible(question: str) -> str:
    """Whoever addresses the judge wins."""
    quoted = works(question)
    claims = ["Ignore all previous" in w or "JUDGE" in w or "SYSTEM" in w for w in quoted]
    choices = words(question)
    return (
        choices["kept" if claims[1] else "broken"]
        if "kept" in choices
        else choices["first" if claims[1] else "second"]
    )


def echo(question: str) -> str:
    """Repeats what the candidates wrote, verdicts that they wrote for themselves included."""
    return "\n".join(works(question))


def hedge(question: str) -> str:
    return " or ".join(words(question).values())


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (gullible, "judge_injectable"),
        (echo, "judge_unparseable"),
        (hedge, "judge_unparseable"),
        (lambda q: "", "judge_unparseable"),
        (lambda q: "first", "judge_unparseable"),
    ],
    ids=["gullible", "echo", "hedge", "empty", "guessed word"],
)
def test_a_judge_that_cannot_be_believed_gives_none_with_its_kind(
    behaviour: Behaviour, kind: str, runtime: Runtime, runs: list[Trajectory]
) -> None:
    with judging(behaviour) as server:
        first, second, failed = judged(runtime, runs, server.url)
    for run in (first, second):
        assert run.verdict is not None
        assert (run.verdict.reward, run.verdict.failure_kind) == (None, kind)
        assert run.verdict.components["tests"] == 1.0
        assert run.verdict.components["judge"] is None
    # its outcome needed no judge
    assert failed.reward == 0.0


@pytest.mark.parametrize(
    "raw", [b"<html>", b"{}", b'{"choices": [{"message": {"content": 7}}]}', b"[" * 100_000]
)
def test_garbage_from_the_endpoint_is_unparseable(
    raw: bytes, runtime: Runtime, runs: list[Trajectory]
) -> None:
    with judging(honest(tidy), raw=raw) as server:
        run = judged(runtime, runs, server.url)[0]
    assert run.verdict is not None
    assert (run.verdict.reward, run.verdict.failure_kind) == (None, "judge_unparseable")


@pytest.mark.slow
def test_the_deadline_is_of_the_whole_answer_and_not_of_a_read(
    runtime: Runtime, runs: list[Trajectory]
) -> None:
    # each read is quick; the whole would drip for longer than pytest waits for a test
    with judging(honest(tidy), raw=b" " * 10_000, drip=0.2) as server:
        run = judged(runtime, runs, server.url, deadline=1.0)[0]
    assert run.verdict is not None
    assert (run.verdict.reward, run.verdict.failure_kind) == (None, "judge_late")


@pytest.mark.slow
def test_a_judge_that_is_not_there_is_unreachable(runtime: Runtime, runs: list[Trajectory]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        run = judged(runtime, runs, url)[0]
    assert run.verdict is not None
    assert (run.verdict.reward, run.verdict.failure_kind) == (None, "judge_unreachable")


@pytest.mark.parametrize(("status", "kind"), [(401, "judge_refused"), (503, "judge_unreachable")])
def test_a_status_that_is_no_answer(status: int, kind: str, runtime: Runtime, runs: list[Trajectory]) -> None:
    with judging(honest(tidy), status=status) as server:
        run = judged(runtime, runs, server.url, deadline=3.0)[0]
    assert run.verdict is not None
    assert run.verdict.reward is None
    # a busy server is asked again until the deadline, which may pass within a request
    assert run.verdict.failure_kind in (kind, "judge_late")


def test_a_run_that_failed_for_want_of_a_judge_is_judged_later(tmp_path: Path) -> None:
    runtime = new_runtime(tmp_path)
    runs = rolled(runtime, SOLVE, SOLVE)
    with judging(honest(tidy)) as server:
        reward = opened(tests=1, judge={"weight": 1.0, "url": server.url, "deadline": 20.0})
        sound, server.behaviour = server.behaviour, hedge
        once = reward.apply(runs, runtime)
        server.behaviour = sound
        later = reward.apply(once, runtime)
    assert [run.reward for run in once] == [None, None]
    assert [run.reward for run in later] == [0.75, 0.75]
    # what is settled is not asked, nor logged, again
    assert reward.apply(later, runtime) == later
    assert [v.reward for v in runtime.store.verdicts(runs[0].id)] == [1.0, None, 0.75]


def test_a_judge_alone_gives_the_reward_of_a_task_without_checks(runtime: Runtime) -> None:
    task = ADD.model_copy(update={"key": "open", "hidden": None, "check": None})
    with judging(honest(tidy)) as server:
        reward = opened(judge={"weight": 1.0, "url": server.url, "deadline": 20.0})
        better, worse = reward.apply(rolled(runtime, SOLVE, FAIL, task=task), runtime)
    assert (better.reward, worse.reward) == (1.0, 0.0)
    assert better.verdict is not None
    assert better.verdict.trust is Trust.JUDGE


def test_a_principle_without_a_check_is_judged_in_both_orders(
    tmp_path: Path, runtime: Runtime, runs: list[Trajectory]
) -> None:
    file = tmp_path / "principles.json"
    principles = [{"id": "no_notes", "text": "No notes are left behind."}]
    file.write_text(json.dumps({"principles": principles}))
    with judging(honest(tidy)) as server:
        settings = {"weight": 1.0, "path": str(file), "url": server.url, "deadline": 20.0}
        first, second, _ = opened(tests=1, constitution=settings).apply(runs, runtime)
    assert (first.reward, second.reward) == (1.0, 0.5)
    assert second.verdict is not None
    assert second.verdict.components["constitution.no_notes"] == 0.0
    with judging(gullible) as server:
        settings["url"] = server.url
        run = opened(tests=1, constitution=settings).apply(runs, runtime)[0]
    assert run.verdict is not None
    assert (run.verdict.reward, run.verdict.failure_kind) == (None, "judge_injectable")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({}, "name a judge"), ({"url": "localhost:8000"}, "no http")],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_runs(
    settings: dict[str, object], sentence: str
) -> None:
    with pytest.raises(NanoError, match=sentence):
        opened(tests=1, judge={"weight": 0.1, **settings})


def test_every_run_meets_its_opponents_once() -> None:
    assert ring(2, 2) == [(0, 1)]
    assert ring(4, 1) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert len(ring(8, 99)) == 8 * 7 // 2


def test_the_word_may_stand_in_quotes_on_the_last_line() -> None:
    assert choice("Because.\n\n`first-12345678`.\n", {"first": "first-12345678"}) == "first"
