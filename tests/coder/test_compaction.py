"""A context that fills is summarised by the policy itself, and the run goes on in a new row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executions import a_runtime, a_task, act, limits, prompt_proof
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strict_api import KEY, Fail, Say, call, strict_api

from nano_coder.agent.compaction import MOST_SUMMARIES
from nano_coder.agent.profiles import find_profile
from nano_coder.models.endpoint.policy import EndpointPolicy, Patience
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunHooks, Runtime, resume_run, run_task
from nano_coder.run.fork import fork_run, say_to_run
from nano_coder.verify.trainable import verify
from nano_rl.learn.groups import to_samples
from nano_shared.types import Role, Sampling, StopReason, Trajectory

DAY = find_profile("workday-2-hermes-json")
SUMMARY = "I read lines of a.py; line {} comes next."
PATCH = "*** Begin Patch\n*** Add File: f{}\n+{}\n*** End Patch"
CONTEXT, ANSWER = 4000, 400


def actions(turns: int) -> list[str]:
    """As many different actions; every tenth changes a file."""
    steps = [f"step {n} of the long work: read, compare, note what differs" for n in range(turns)]
    return [
        act("apply_patch", DAY, patch=PATCH.format(n, n)) if n % 10 == 9
        else act("plan", DAY, steps=[{"step": step, "status": "in_progress"}])
        for n, step in enumerate(steps)
    ]  # fmt: skip


class Summarising(ScriptedPolicy):
    """Acts by its script, and writes a summary whenever it is asked for one."""

    summary = SUMMARY

    def _next(self) -> str:
        return self._said

    def complete(self, conversation: Any, sampling: Sampling) -> Any:
        asked = conversation.messages[-1].content == DAY.compaction.request  # type: ignore[union-attr]
        done = sum(m.role is Role.ASSISTANT for m in conversation.messages)
        self._said = self.summary.format(done) if asked else super()._next()
        return super().complete(conversation, sampling)


def runtime_of(folder: Path, texts: list[str], **changes: Any) -> Runtime:
    kind, context = changes.pop("policy", Summarising), changes.pop("context_limit", CONTEXT)
    policy = kind(texts, tokens=True, context_limit=context)
    return a_runtime(folder, profile=DAY, sampling=Sampling(max_tokens=ANSWER), policy=policy, **changes)


def long_task(turns: int = 100) -> Any:
    return a_task(files={"a.py": "x = 1\n" * 20}, limits=limits(max_turns=turns + 20))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trajectory, Runtime]:
    """A hundred actions, and as many summaries as its context needs."""
    runtime = runtime_of(tmp_path_factory.mktemp("long"), [*actions(100), act("submit", DAY, answer="done")])
    return run_task(long_task(), runtime, seed=1), runtime


def findings(run: Trajectory) -> list[str]:
    return [f.kind for f in verify(run) if f.blocks and f.kind != "no verdict"]


@pytest.mark.slow
def test_a_run_of_a_hundred_turns_goes_on_over_its_context(long_run: tuple[Trajectory, Runtime]) -> None:
    run, runtime = long_run
    assert (run.stop, run.answer) == (StopReason.FINISHED, "done")
    summaries = [turn for turn in run.turns if turn.is_summary]
    rows = [turn.completion.tokens.row for turn in run.turns if turn.completion.tokens]
    assert len(summaries) >= 3
    assert max(rows) == len(summaries)
    assert len(run.turns) == 101 + len(summaries)
    assert findings(run) == []
    assert prompt_proof(run, runtime).differing is None
    assert runtime.store.get(run.id) == run


def test_what_the_model_read_grows_with_what_was_new(long_run: tuple[Trajectory, Runtime]) -> None:
    run, _ = long_run
    read = [len(turn.completion.tokens.context_ids) for turn in run.turns if turn.completion.tokens]
    begins = [n for n, turn in enumerate(run.turns) if n == 0 or run.turns[n - 1].is_summary]
    rows = sum(read[n] for n in begins)
    seen = sum(len(o.text) for turn in run.turns for o in turn.observations)
    assert rows <= len(begins) * CONTEXT * 3 // 4, "a row begins with less than it may hold"
    assert sum(read) - rows < 2 * seen + len(begins) * 1000, "else only observations and requests are read"


def test_every_sampled_token_is_trained_once_by_one_advantage(long_run: tuple[Trajectory, Runtime]) -> None:
    run, _ = long_run
    samples = to_samples(run, 0.5)
    assert len(samples) == 1 + sum(turn.is_summary for turn in run.turns)
    assert sum(row.num_action_tokens for row in samples) == run.num_sampled_tokens
    assert {row.advantage for row in samples} == {0.5}
    for row, turn in zip(samples, (t for t in run.turns if t.is_summary), strict=False):
        at = [n for n, index in enumerate(row.turn_ids_T) if index == turn.index and row.mask[n]]
        assert turn.completion.tokens is not None
        assert tuple(row.ids[n] for n in at) == turn.completion.tokens.sampled_ids
        assert at[-1] == len(row.ids) - 1, "the summary ends its row"


def summary_at(run: Trajectory, number: int = 1) -> int:
    return [turn.index for turn in run.turns if turn.is_summary][number]


def without_times(run: Trajectory) -> list[Any]:
    now = {"started": 0.0, "ended": 0.0}
    return [
        turn.model_copy(
            update={**now, "observations": tuple(o.model_copy(update=now) for o in turn.observations)}
        )
        for turn in run.turns
    ]


@pytest.mark.some(1)
@pytest.mark.parametrize("after", [-1, 0, 1])
def test_a_run_killed_at_a_summary_goes_on_exactly(
    long_run: tuple[Trajectory, Runtime], tmp_path: Path, after: int
) -> None:
    whole, _ = long_run
    cut = summary_at(whole) + after
    done = sum(not turn.is_summary for turn in whole.turns[: cut + 1])
    texts = [*actions(100), act("submit", DAY, answer="done")]
    runtime = runtime_of(tmp_path, texts)

    class Killed(BaseException):
        pass

    def kill(turn: Any) -> None:
        if turn.index == cut:
            raise Killed

    with pytest.raises(Killed):
        run_task(long_task(), replace(runtime, hooks=RunHooks(turn=kill)), seed=1)
    policy = Summarising(texts[done:], tokens=True, context_limit=CONTEXT)
    again = resume_run("last", replace(runtime, policy=policy))
    assert without_times(again) == without_times(whole)


def test_forks_and_messages_go_on_from_a_summary(long_run: tuple[Trajectory, Runtime]) -> None:
    run, runtime = long_run
    at = summary_at(run, -1) + 1
    policy = Summarising([act("submit", DAY, answer="forked")] * 2, tokens=True, context_limit=CONTEXT)
    (fork,) = fork_run(run, replace(runtime, policy=policy), at=at, n=1, seed=3)
    assert (fork.answer, len(fork.turns)) == ("forked", at + 1)
    assert fork.turns[at].messages == run.turns[at].messages
    assert findings(fork) == []
    said = say_to_run(run, "And now?", replace(runtime, policy=policy))
    assert said.answer == "forked"
    assert findings(said) == []


@pytest.mark.parametrize(
    ("summary", "context", "detail"),
    [
        (" ", CONTEXT, "wrote an empty one"),
        ("x" * 40_000, 5_000, None),
    ],
)
def test_a_summary_that_helps_nothing_ends_the_run_with_a_sentence(
    tmp_path: Path, summary: str, context: int, detail: str | None
) -> None:
    class Other(Summarising):
        pass

    Other.summary = summary
    runtime = runtime_of(tmp_path, actions(30), policy=Other, context_limit=context)
    run = run_task(long_task(30), runtime)
    if detail is None:  # it is cut to its share, and the work goes on
        assert run.stop is StopReason.POLICY_ERROR, run.stop_detail
        assert run.has_summary
    else:
        assert run.stop is StopReason.CONTEXT_FULL
        assert detail in str(run.stop_detail)


def test_a_run_is_summarised_so_often_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_coder.agent.compaction.MOST_SUMMARIES", 1)
    run = run_task(long_task(), runtime_of(tmp_path, actions(100)))
    assert (run.stop, sum(t.is_summary for t in run.turns)) == (StopReason.CONTEXT_FULL, 1)
    assert "summarised 1 times" in str(run.stop_detail)
    assert MOST_SUMMARIES > 1


def test_observations_that_do_not_fit_are_cut_for_the_summary_alone(tmp_path: Path) -> None:
    texts = [*actions(8), act("bash", DAY, command="seq 800"), act("submit", DAY)]
    run = run_task(long_task(), runtime_of(tmp_path, texts))
    assert run.stop is StopReason.FINISHED
    at = summary_at(run, 0)
    whole, asked = run.turns[at - 1].observations[0].text, run.turns[at].messages[0].content
    assert len(whole) > 2_000
    assert len(asked) < len(whole)
    assert "[cut: first and last part" in asked
    begun = run.turns[at + 1].messages
    assert begun[1].content.startswith("fix it")
    assert "Go on from there" in begun[1].content
    assert findings(run) == []


def test_a_frozen_profile_still_ends_where_its_context_is_full(tmp_path: Path) -> None:
    runtime = replace(runtime_of(tmp_path, actions(100)), profile=find_profile("workday-1-hermes-json"))
    run = run_task(long_task(), runtime)
    assert (run.stop, run.has_summary) == (StopReason.CONTEXT_FULL, False)


def test_a_server_that_reads_less_than_it_says_is_believed(tmp_path: Path) -> None:
    steps: list[Any] = [Say(None, (call("plan", steps=[{"step": f"{n} {'x' * 2000}"}]),)) for n in range(4)]
    told = (
        b'{"error": {"message": "This model\'s maximum context length is 5000 tokens, however you requested'
    )
    told += (
        b' 9000 tokens (8000 in the messages, 1000 in the completion).", "code": "context_length_exceeded"}}'
    )
    steps += [Fail(400, body=told), Say("All is planned."), Say(None, (call("submit", answer="done"),))]
    with strict_api(*steps) as (server, script):
        policy = EndpointPolicy(
            "small", server.base_url, KEY, patience=Patience(first_wait=0.001), own_temperature=True
        )
        api = find_profile("workday-2-api")
        runtime = a_runtime(tmp_path, policy=policy, profile=api, sampling=Sampling(max_tokens=500))
        run = run_task(a_task(), runtime)
    assert (run.stop, run.answer, policy.context_limit) == (StopReason.FINISHED, "done", 5000)
    assert [turn.is_summary for turn in run.turns] == [False] * 4 + [True, False]
    roles = [message["role"] for message in script.seen[-1]["messages"]]
    assert roles[:2] == ["system", "user"]
    assert "All is planned." in script.seen[-1]["messages"][1]["content"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    context=st.integers(1200, 6000),
    lengths=st.lists(st.integers(1, 700), min_size=5, max_size=40),
    summary=st.text("ab \n", max_size=900),
)
def test_whatever_is_written_rows_fit_and_hold_what_was_read(
    tmp_path: Path, context: int, lengths: list[int], summary: str
) -> None:
    class Written(Summarising):
        pass

    Written.summary = summary
    texts = [act("plan", DAY, steps=[{"step": f"{n}" + "x" * length}]) for n, length in enumerate(lengths)]
    runtime = runtime_of(tmp_path, texts, policy=Written, context_limit=context)
    run = run_task(long_task(), runtime, seed=1)
    assert run.stop in (
        StopReason.POLICY_ERROR, StopReason.CONTEXT_FULL, StopReason.FORMAT_ERRORS, StopReason.LOOP
    )  # fmt: skip
    assert [kind for kind in findings(run) if kind not in ("failure of ours", "no turns")] == []
    assert prompt_proof(run, runtime).differing is None
    for row in to_samples(run, 1.0) if run.turns else ():
        assert len(row.ids) <= context
