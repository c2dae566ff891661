"""A sub-agent works inside the run of its parent: its turns, rows and limits are the run's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executions import a_runtime, a_task, act, limits, prompt_proof
from strict_api import KEY, Say, call, strict_api

from nano_coder.agent.profiles import find_profile
from nano_coder.commands.display import Display
from nano_coder.models.endpoint.policy import EndpointPolicy, Patience
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunHooks, Runtime, resume_run, run_task
from nano_coder.run.fork import fork_run, say_to_run
from nano_coder.verify.trainable import findings, verify
from nano_formats.token_triple import TokenRows, triples
from nano_rl.imitation import run_messages
from nano_rl.learn.groups import to_samples
from nano_shared.run_facts import RunFilter, facts_of
from nano_shared.types import Sampling, StopReason, Trajectory

DAY = find_profile("workday-2-hermes-json")


def plan(step: str) -> str:
    return act("plan", DAY, steps=[{"step": step}])


def patch(name: str) -> str:
    return act("apply_patch", DAY, patch=f"*** Begin Patch\n*** Add File: {name}\n+new\n*** End Patch")


DELEGATE = act("delegate", DAY, prompt="Add b.py.", max_turns=5)
TEXTS = [
    plan("begin"), DELEGATE, patch("b.py"), plan("inside"), act("submit", DAY, answer="b.py is there"),
    plan("between"), act("delegate", DAY, prompt="Look at it."), act("submit", DAY, answer="it is new"),
    patch("c.py"), act("submit", DAY, answer="done"),
]  # fmt: skip
OWNERS = [None, None, 1, 1, 1, None, None, 6, None, None]
ROWS = [0, 0, 1, 1, 1, 0, 0, 2, 0, 0]


def runtime_of(folder: Path, texts: list[str], **changes: Any) -> Runtime:
    return a_runtime(folder, texts, profile=DAY, sampling=Sampling(max_tokens=2000), **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trajectory, Runtime]:
    runtime = runtime_of(tmp_path_factory.mktemp("whole"), TEXTS)
    return run_task(a_task(), runtime, seed=1), runtime


def blocks(run: Trajectory) -> list[str]:
    return [f.kind for f in verify(run) if f.blocks and f.kind != "no verdict"]


def rows_of(run: Trajectory) -> list[int]:
    return [turn.completion.tokens.row for turn in run.turns if turn.completion.tokens]


def test_a_sub_agent_has_rows_of_its_own_and_answers_its_call(
    whole: tuple[Trajectory, Runtime],
) -> None:
    run, runtime = whole
    assert (run.stop, run.answer) == (StopReason.FINISHED, "done")
    assert [turn.delegated_by for turn in run.turns] == OWNERS
    assert rows_of(run) == ROWS
    assert [o.text for o in run.turns[1].observations] == ["b.py is there"]
    first = run.turns[2].messages
    assert first[1].content.startswith("Add b.py.")
    assert "Check:" not in first[1].content
    assert runtime.store.get(run.id) == run
    assert blocks(run) == []
    (facts,) = runtime.store.facts(RunFilter(runs=(run.id,)))
    assert facts == facts_of(run)
    assert [f.kind for f in findings(facts) if f.blocks] == ["no verdict"]


def test_its_prompts_are_proved(whole: tuple[Trajectory, Runtime]) -> None:
    run, runtime = whole
    proof = prompt_proof(run, runtime)
    assert (proof.equal, proof.differing) == (len(run.turns), None)


def test_it_trains_with_the_run(whole: tuple[Trajectory, Runtime]) -> None:
    run, _ = whole
    samples = to_samples(run, 0.5)
    assert [sorted(set(row.turn_ids_T)) for row in samples] == [[0, 1, 5, 6, 8, 9], [2, 3, 4], [7]]
    assert sum(row.num_action_tokens for row in samples) == run.num_sampled_tokens
    assert {row.advantage for row in samples} == {0.5}
    texts = [message.content for message in run_messages(run, DAY)]
    assert not any("inside" in text for text in texts)
    assert "b.py is there" in texts


def test_its_tokens_survive_as_triples(whole: tuple[Trajectory, Runtime]) -> None:
    run, _ = whole
    rows = TokenRows()
    back = [rows.tokens(triple, row) for triple, row in zip(triples(run), rows_of(run), strict=True)]
    assert back == [turn.completion.tokens for turn in run.turns]


def without_times(run: Trajectory) -> list[Any]:
    now = {"started": 0.0, "ended": 0.0}
    return [
        turn.model_copy(
            update={**now, "observations": tuple(o.model_copy(update=now) for o in turn.observations)}
        )
        for turn in run.turns
    ]


@pytest.mark.some(2)
@pytest.mark.parametrize("cut", range(1, len(TEXTS) - 1))
def test_a_run_killed_around_a_sub_agent_goes_on_exactly(
    whole: tuple[Trajectory, Runtime], tmp_path: Path, cut: int
) -> None:
    runtime = runtime_of(tmp_path, TEXTS)

    class Killed(BaseException):
        pass

    def kill(turn: Any) -> None:
        if turn.index == cut:
            raise Killed

    with pytest.raises(Killed):
        run_task(a_task(), replace(runtime, hooks=RunHooks(turn=kill)), seed=1)
    policy = ScriptedPolicy(TEXTS[cut + 1 :], tokens=True)
    again = resume_run("last", replace(runtime, policy=policy))
    assert without_times(again) == without_times(whole[0])
    assert runtime.store.get(again.id) == again


@pytest.mark.parametrize(("at", "waits"), [(2, True), (3, True), (5, False), (7, True)])
def test_a_fork_inside_a_sub_agent_goes_on_inside_it(
    whole: tuple[Trajectory, Runtime], at: int, waits: bool
) -> None:
    run, runtime = whole
    rest = [act("submit", DAY, answer="another")] * 2
    (fork,) = fork_run(run, replace(runtime, policy=ScriptedPolicy(rest, tokens=True)), at=at, n=1, seed=2)
    assert fork.answer == "another"
    assert len(fork.turns) == at + (2 if waits else 1)
    assert fork.turns[at].delegated_by == (OWNERS[at] if waits else None)
    assert blocks(fork) == []


def test_the_limits_of_a_sub_agent_end_it_and_those_of_the_run_end_both(tmp_path: Path) -> None:
    steps = [plan(f"{n}") for n in range(9)]
    short = act("delegate", DAY, prompt="Plan it.", max_turns=2)
    run = run_task(a_task(), runtime_of(tmp_path / "a", [short, *steps[:2], act("submit", DAY)]))
    assert run.stop is StopReason.FINISHED
    (answer,) = run.turns[0].observations
    assert (answer.ok, "max_turns" in answer.text) == (False, True)
    runtime = runtime_of(tmp_path / "b", [DELEGATE, *steps])
    run = run_task(a_task(limits=limits(max_turns=3)), runtime)
    assert (run.stop, len(run.turns)) == (StopReason.MAX_TURNS, 3)
    assert "gave no answer" in run.turns[0].observations[0].text
    assert runtime.store.get(run.id) == run
    ended = replace(runtime, policy=ScriptedPolicy([act("submit", DAY, answer="yes")], tokens=True))
    begun = run_task(a_task(limits=limits(max_turns=1)), runtime_of(tmp_path / "c", [DELEGATE]))
    assert [o.ok for o in begun.turns[0].observations] == [False], "it never began"
    said = say_to_run(run, "Is it planned?", ended)
    assert (said.answer, said.turns[-1].delegated_by) == ("yes", None)
    assert [o.tool for o in said.turns[0].observations] == ["delegate", "user"]


def test_a_sub_agent_has_none_of_its_own_and_wrong_calls_say_why(tmp_path: Path) -> None:
    both = act("delegate", DAY, prompt="x") + "\n" + plan("y")
    texts = [act("delegate", DAY, prompt=" "), both, DELEGATE, DELEGATE, "prose", "an answer",
             act("submit", DAY, answer="z")]  # fmt: skip
    run = run_task(a_task(), runtime_of(tmp_path, texts))
    assert run.answer == "z"
    told = [[o.text for o in turn.observations] for turn in run.turns]
    assert "the prompt is empty" in told[0][0]
    assert "must be the last call" in told[1][0]
    assert "unknown tool delegate" in told[3][0]
    assert told[2] == ["an answer"]
    assert blocks(run) == []


def test_a_failing_model_leaves_a_sub_agent_that_resumes_or_is_talked_over(tmp_path: Path) -> None:
    runtime = runtime_of(tmp_path, TEXTS[:3])
    cut = run_task(a_task(), runtime)
    assert (cut.stop, len(cut.turns[1].observations)) == (StopReason.POLICY_ERROR, 0)
    ended = replace(runtime, policy=ScriptedPolicy([act("submit", DAY, answer="ok")], tokens=True))
    said = say_to_run(cut, "Stop that.", ended)
    assert said.answer == "ok"
    assert "interrupted" in said.turns[1].observations[0].text
    rest = replace(runtime, policy=ScriptedPolicy(TEXTS[3:], tokens=True))
    assert resume_run(cut.id, rest).answer == "done"


def test_a_hosted_model_delegates_by_native_calls(tmp_path: Path) -> None:
    steps = [
        Say(None, (call("plan", steps=[{"step": "a"}]), call("delegate", prompt="Say what a.py holds."))),
        Say(None, (call("read", path="a.py"),)),
        Say(None, (call("submit", answer="one and two"),)),
        Say(None, (call("submit", answer="done"),)),
    ]
    with strict_api(*steps) as (server, script):
        policy = EndpointPolicy(
            "big", server.base_url, KEY, patience=Patience(first_wait=0.001), own_temperature=True
        )
        runtime = a_runtime(tmp_path, policy=policy, profile=find_profile("workday-2-api"))
        run = run_task(a_task(), runtime)
    assert (run.stop, run.answer) == (StopReason.FINISHED, "done")
    assert [turn.delegated_by for turn in run.turns] == [None, 0, 0, None]
    names = [[tool["function"]["name"] for tool in asked["tools"]] for asked in script.seen]
    assert ["delegate" in offered for offered in names] == [True, False, False, True]
    last = script.seen[-1]["messages"]
    assert [m["role"] for m in last] == ["system", "user", "assistant", "tool", "tool"]
    assert last[-1]["content"] == "one and two"


def test_the_display_names_the_step_that_delegated(
    whole: tuple[Trajectory, Runtime], capsys: pytest.CaptureFixture[str]
) -> None:
    display = Display(quiet=False)
    for turn in whole[0].turns[:3]:
        display.turn(turn)
    assert "step 3 (sub-agent of step 2)" in capsys.readouterr().err
