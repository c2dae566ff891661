"""Builders and hypothesis strategies for the values that the log keeps."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from nano_shared.types import (
    ApiAnswer,
    ApiCall,
    CheckRun,
    Completion,
    Denials,
    Finish,
    ImageRef,
    Observation,
    OracleAction,
    Sampling,
    Split,
    StopReason,
    Tampering,
    Task,
    ToolCall,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
    Usage,
    Verdict,
)

# Any text at all: NUL, lone surrogates and the store's own escape included.
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=12) | st.just('\x1bjson:"x"')
names = texts.filter(lambda text: bool(text.strip()))
floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(ToolCall, name=texts, arguments=st.dictionaries(texts, json_values, max_size=3))
image_refs = st.builds(
    ImageRef,
    blob=st.from_regex(r"\Asha256:[0-9a-f]{64}\Z"),
    media_type=st.sampled_from(["image/png", "image/jpeg"]),
    width=st.integers(1, 2**31),
    height=st.integers(1, 2**31),
)
observations = st.builds(
    Observation,
    tool=texts,
    ok=st.booleans(),
    text=texts,
    exit_code=st.none() | st.integers(-(2**31), 2**31 - 1),
    signal=st.none() | st.integers(1, 64),
    timed_out=st.booleans(),
    bytes_total=st.integers(0, 2**62),
    truncated=st.booleans(),
    blob=st.none() | texts,
    files_changed=st.lists(texts, max_size=3).map(tuple),
    denials=st.builds(Denials, network=counts, secrets=counts, writes_outside=counts),
    images=st.lists(image_refs, max_size=2).map(tuple),
    started=floats,
    ended=floats,
)
check_runs = st.builds(
    CheckRun,
    exit_code=st.none() | st.integers(0, 255),
    signal=st.none() | st.integers(1, 64),
    timed_out=st.booleans(),
    not_run=st.none() | texts,
    output=texts,
)
verdicts = st.builds(
    Verdict,
    reward=st.none() | floats,
    components=st.dictionaries(texts, st.none() | floats, max_size=3),
    turn_rewards=st.none() | st.lists(floats, max_size=3).map(tuple),
    checks=st.dictionaries(texts, texts, max_size=3),
    tampering=st.lists(st.builds(Tampering, kind=texts, detail=texts), max_size=2).map(tuple),
    failure_kind=st.none() | texts,
    trust=st.sampled_from(Trust),
    grader=texts,
    graded_hash=texts,
    check_run=st.none() | check_runs,
)


@st.composite
def turn_tokens(draw: st.DrawFn) -> TurnTokens:
    sampled = draw(st.lists(st.integers(0, 2**32 - 1), max_size=5))
    logprob = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
    return TurnTokens(
        row=draw(counts),
        context_ids=tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=5))),
        sampled_ids=tuple(sampled),
        logprobs=tuple(draw(st.lists(logprob, min_size=len(sampled), max_size=len(sampled)))),
    )


api_answers = st.builds(
    ApiAnswer,
    calls=st.lists(st.builds(ApiCall, id=texts, name=texts, arguments=texts), max_size=2).map(tuple),
    reasoning=texts,
    usage=st.builds(
        Usage, prompt=counts, completion=counts, estimated=st.booleans(), cost=st.none() | st.floats(0, 100)
    ),
    left_out=st.lists(texts, max_size=2).map(tuple),
)
completions = st.builds(
    Completion,
    text=texts,
    finish=st.sampled_from(Finish),
    tokens=st.none() | turn_tokens(),
    sampling=st.builds(Sampling, temperature=st.floats(0, 2), seed=st.none() | st.integers()),
    policy_id=texts,
    policy_version=counts,
    api=st.none() | api_answers,
)
actions = st.builds(OracleAction, name=names, arguments=st.just({"n": 1}), thought=texts)
tasks = st.builds(
    Task,
    key=names,
    prompt=names,
    files=st.dictionaries(st.sampled_from(["a.py", "b/c.py", "é"]), texts, max_size=2),
    snapshot=st.none() | texts,
    artifacts=st.lists(texts, max_size=2).map(tuple),
    tools=st.none() | st.lists(texts, max_size=2).map(tuple),
    check=st.none() | texts,
    oracle=st.none() | st.lists(actions, max_size=2).map(tuple),
    split=st.none() | st.sampled_from(Split),
    level=st.none() | counts,
    family=st.none() | texts,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    turns = [
        Turn(
            index=index,
            completion=draw(completions),
            thought=draw(texts),
            calls=tuple(draw(st.lists(calls, max_size=2))),
            parse_error=draw(st.none() | texts),
            parser=draw(texts),
            repairs=tuple(draw(st.lists(texts, max_size=2))),
            observations=tuple(draw(st.lists(observations, max_size=2))),
            snapshot=draw(st.none() | texts),
            started=draw(floats),
            ended=draw(floats),
        )
        for index in range(draw(st.integers(0, 3)))
    ]
    optional = st.none() | texts
    return Trajectory(
        id=draw(names),
        task=draw(tasks),
        turns=tuple(turns),
        stop=draw(st.none() | st.sampled_from(StopReason)),
        verdict=draw(st.none() | verdicts),
        ended=draw(st.none() | floats),
        seed=draw(st.none() | st.integers()),
        diff=draw(texts),
        directory=draw(optional),
        started=draw(floats),
        **{name: draw(optional) for name in ("stop_detail", "answer", "snapshot", "parent")},
        **{name: draw(texts) for name in _REQUIRED},
    )


_REQUIRED = ("runtime_version", "profile", "profile_hash", "template_hash", "tools_hash", "policy")


def a_run(run_id: str = "run1", **changes: Any) -> Trajectory:
    """A run that has just begun."""
    fields: dict[str, Any] = {"task": Task(key="sum", prompt="add two numbers"), "started": 1.0}
    return Trajectory(id=run_id, **{name: name for name in _REQUIRED} | fields | changes)


def a_turn(index: int = 0, *, tokens: bool = True, **changes: Any) -> Turn:
    """A turn with one tool call, sampled by `weights`."""
    sampled = TurnTokens(context_ids=(1, 2, 3), sampled_ids=(4, 5), logprobs=(-0.1, -1 / 3))
    completion = Completion(
        text=f"step {index}",
        finish=Finish.STOP,
        tokens=sampled if tokens else None,
        sampling=Sampling(),
        policy_id="weights",
    )
    call = ToolCall(name="shell", arguments={"command": "ls"})
    seen = Observation(tool="shell", ok=True, text="a.py", exit_code=0, started=2.0, ended=3.0)
    fields: dict[str, Any] = {"calls": (call,), "observations": (seen,), "started": 1.0, "ended": 3.5}
    return Turn(index=index, completion=completion, parser="compact", **fields | changes)


def a_verdict(reward: float | None = 1.0, grader: str = "cases/1") -> Verdict:
    return Verdict(reward=reward, trust=Trust.HIDDEN, grader=grader, graded_hash="sha256:0")
