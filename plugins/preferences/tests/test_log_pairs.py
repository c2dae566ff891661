"""Pairs out of the log: successes against failures, what people said, and what makes no pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import verdict

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1
from nano_preferences.log_pairs import log_pairs
from nano_preferences.pairs import PreferencePair, read_pairs, write_pairs
from nano_shared.errors import UsageError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Observation,
    Sampling,
    Split,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    TurnTokens,
)


def run(
    name: str, reward: float | None, *, key: str = "task-0", text: str | None = None, template: str = "t",
    exact: bool = True, **task: object,
) -> Trajectory:  # fmt: skip
    """A run of two turns with an observation between them."""
    said_id = sum(map(ord, text or name))
    turns = []
    for i, said in enumerate([text or f"@search\n{name}", "@submit"]):
        tokens = TurnTokens(context_ids=(1, 2, 3), sampled_ids=(10 + i, said_id), logprobs=(-1.0, -0.5))
        completion = Completion(
            text=said,
            finish=Finish.STOP,
            tokens=tokens if exact else None,
            sampling=Sampling(),
            policy_id="p",
        )
        seen = Observation(tool="search", ok=True, text="nothing found", started=0.0, ended=0.0)
        turns.append(
            Turn(
                index=i,
                completion=completion,
                calls=DIALECTS[COMPACT_1.dialect].parse(said, COMPACT_1.tools).calls,
                parser="compact",
                observations=() if i else (seen,),
                started=0.0,
                ended=0.0,
            )
        )
    return Trajectory(
        id=name, task=Task(key=key, prompt="Find it.", files={"a.py": ""}, **task), turns=tuple(turns),
        stop=StopReason.FINISHED, runtime_version="0", profile=COMPACT_1.name, profile_hash=COMPACT_1.hash,
        template_hash=template, tools_hash=COMPACT_1.tools_hash, policy="p", started=0.0,
        verdict=None if reward is None else verdict(reward),
    )  # fmt: skip


def logged(tmp_path: Path, *runs: Trajectory) -> LogStore:
    store = LogStore.open(tmp_path / "log.db")
    for one in runs:
        store.append(one)
    return store


def named(pairs: tuple[PreferencePair, ...]) -> set[tuple[str | None, str | None]]:
    return {(pair.chosen_run, pair.rejected_run) for pair in pairs}


def test_a_success_is_preferred_to_a_failure_of_the_same_task(tmp_path: Path) -> None:
    store = logged(tmp_path, run("good", 1.0), run("bad", 0.0), run("other", 0.0, key="task-1"))
    found = log_pairs(store)
    assert named(found.pairs) == {("good", "bad")}
    (pair,) = found.pairs
    assert [m.role for m in pair.prompt] == ["system", "user"]
    assert [m.role for m in pair.chosen] == ["assistant", "tool", "assistant"]
    assert pair.chosen[0].content == "@search\ngood"
    assert pair.exact is not None
    # the tokens as they were logged, trained exactly where the policy sampled
    good = sum(map(ord, "good"))
    assert pair.exact.chosen[0].ids == (1, 2, 3, 10, good, 1, 2, 3, 11, good)
    assert pair.exact.chosen[0].mask == (0, 0, 0, 1, 1, 0, 0, 0, 1, 1)
    assert found.refused == {"graded: no other of its task to compare with": 1}


def test_runs_that_are_all_good_enough_or_none_of_them_make_no_pair(tmp_path: Path) -> None:
    found = log_pairs(logged(tmp_path, run("one", 0.0), run("two", 0.5)))
    assert found.pairs == ()
    assert found.refused == {"graded: the runs of its task are all good enough, or none is": 2}


def test_a_run_is_in_one_graded_pair_at_most_and_tasks_are_bounded(tmp_path: Path) -> None:
    runs = [run(f"run-{i}", float(i % 2)) for i in range(9)]
    store = logged(tmp_path, *runs)
    pairs = log_pairs(store, per_task=3).pairs
    used = [name for pair in pairs for name in (pair.chosen_run, pair.rejected_run)]
    assert (len(pairs), len(set(used))) == (3, 6)
    assert named(pairs) == named(log_pairs(store, per_task=3).pairs)
    assert named(pairs) != named(log_pairs(store, per_task=3, seed=1).pairs)


def test_what_cannot_be_compared_is_counted_by_its_reason(tmp_path: Path) -> None:
    ours = run("ours", 0.0).model_copy(update={"stop": StopReason.SANDBOX_ERROR, "verdict": None})
    judged = run("judged", 0.0).model_copy(
        update={"verdict": verdict(0.0).model_copy(update={"trust": Trust.JUDGE})}
    )
    foreign = run("foreign", 0.0).model_copy(update={"profile_hash": "another"})
    store = logged(
        tmp_path, run("good", 1.0), ours, judged, foreign, run("held out", 0.0, split=Split.TEST),
        run("elsewhere", 0.0, template="u"),
    )  # fmt: skip
    found = log_pairs(store)
    assert found.pairs == ()
    assert found.refused == {
        "unfinished, or a failure of ours": 1,
        "no verdict that can be trusted": 1,
        "made under another profile of that name": 1,
        "of the test split": 1,
        "graded: no other of its task to compare with": 2,
    }


def test_runs_that_say_the_same_prefer_nothing(tmp_path: Path) -> None:
    again = run("bad", 0.0, text="same").model_copy(update={"seed": 2})
    again = again.model_copy(
        update={"turns": tuple(t.model_copy(update={"started": 1.0, "ended": 1.0}) for t in again.turns)}
    )
    store = logged(tmp_path, run("good", 1.0, text="same"), again)
    found = log_pairs(store)
    assert found.pairs == ()
    assert found.refused == {"both runs say the same": 1}


def forked(parent: Trajectory, name: str, reward: float | None) -> Trajectory:
    """A fork of a run after its first step."""
    own = run(name, reward)
    turns = (parent.turns[0], own.turns[0].model_copy(update={"index": 1}))
    return own.model_copy(update={"turns": turns, "parent": parent.id, "parent_step": 1, "task": parent.task})


def test_forks_are_compared_with_forks_of_the_same_step(tmp_path: Path) -> None:
    base, other = run("base", 0.0), run("other", 0.0)
    forks = [forked(base, "kept", 1.0), forked(base, "lost", 0.0), forked(other, "elsewhere", 0.0)]
    found = log_pairs(logged(tmp_path, base, other, *forks))
    assert named(found.pairs) == {("kept", "lost")}
    (pair,) = found.pairs
    # what both took over is read before the first word that is compared
    assert [m.role for m in pair.prompt] == ["system", "user", "assistant", "tool"]
    assert pair.chosen[0].content == "@search\nkept"
    assert pair.exact is not None
    assert [sum(row.mask) for row in (*pair.exact.chosen, *pair.exact.rejected)] == [2, 2]


def test_a_fork_that_somebody_prefers_to_its_parent_parts_from_it_at_the_step(tmp_path: Path) -> None:
    base, other = run("base", None), run("other", None)
    store = logged(tmp_path, base, other, forked(base, "fork", None))
    store.add_feedback("fork", Feedback(created=1.0, kind=FeedbackKind.PREFER, text="base"))
    store.add_feedback("fork", Feedback(created=1.0, kind=FeedbackKind.PREFER, text="other"))
    found = log_pairs(store, sources=["feedback"])
    assert named(found.pairs) == {("fork", "base")}
    (pair,) = found.pairs
    assert pair.rejected[0].content == "@submit"
    assert pair.exact is not None
    # the step that both share is context on both sides
    assert [sum(row.mask) for row in (*pair.exact.chosen, *pair.exact.rejected)] == [2, 2]
    assert found.refused["they went on from different steps"] == 1


def test_a_second_attempt_is_not_compared_with_the_one_it_read_about(tmp_path: Path) -> None:
    failed = run("failed", 0.0)
    told = Observation(tool="reflection", ok=False, text="Not solved yet.", started=0.0, ended=0.0)
    last = failed.turns[1].model_copy(update={"observations": (told,)})
    own = run("second", 1.0).turns[0].model_copy(update={"index": 2})
    second = run("second", 1.0).model_copy(
        update={
            "turns": (failed.turns[0], last, own), "parent": "failed", "parent_step": 2, "task": failed.task,
        }
    )  # fmt: skip
    found = log_pairs(logged(tmp_path, failed, second))
    assert found.pairs == ()
    assert found.refused == {"graded: no other of its task to compare with": 2}


def test_a_pair_knows_which_task_it_trains_on(tmp_path: Path) -> None:
    good = run("good", 1.0, split=Split.TRAIN)
    (pair,) = log_pairs(logged(tmp_path, good, run("bad", 0.0, split=Split.TRAIN))).pairs
    assert (pair.task_id, pair.split) == (good.task.id, Split.TRAIN)


def test_a_damaged_run_makes_no_pair_of_any_source(tmp_path: Path) -> None:
    def broken(name: str, reward: float) -> Trajectory:
        whole = run(name, reward)
        tokens = whole.turns[0].completion.tokens
        assert tokens is not None
        completion = whole.turns[0].completion.model_copy(
            update={"tokens": tokens.model_copy(update={"logprobs": (0.5, -0.5)})}
        )
        return whole.model_copy(
            update={"turns": (whole.turns[0].model_copy(update={"completion": completion}), whole.turns[1])}
        )

    store = logged(tmp_path, run("good", 1.0), broken("bad", 0.0))
    store.add_feedback("good", Feedback(created=1.0, kind=FeedbackKind.PREFER, text="bad"))
    store.add_feedback("good", Feedback(created=1.0, kind=FeedbackKind.THUMB, value=1))
    store.add_feedback("bad", Feedback(created=1.0, kind=FeedbackKind.THUMB, value=-1))
    store.add_feedback("bad", Feedback(created=1.0, kind=FeedbackKind.EDIT, turn=0, text="@submit"))
    found = log_pairs(store)
    assert found.pairs == ()
    assert found.refused["log-prob above 0"] == 1


def test_a_copy_of_a_run_makes_no_second_pair(tmp_path: Path) -> None:
    bad = run("bad", 0.0)
    copies = [bad.model_copy(update={"id": f"copy-{i}"}) for i in range(3)]
    found = log_pairs(logged(tmp_path, run("good", 1.0), run("better", 1.0), bad, *copies))
    assert len(found.pairs) == 1
    assert found.refused["duplicated run"] == 3


def test_runs_of_two_contents_under_one_key_are_not_compared(tmp_path: Path) -> None:
    other = run("bad", 0.0)
    other = other.model_copy(update={"task": other.task.model_copy(update={"prompt": "Find another."})})
    assert log_pairs(logged(tmp_path, run("good", 1.0), other)).pairs == ()


def test_what_people_prefer_is_a_pair_and_stands_against_the_grader(tmp_path: Path) -> None:
    store = logged(tmp_path, run("good", 1.0), run("bad", 0.0), run("lone", None, key="task-1"))
    store.add_feedback("bad", Feedback(kind=FeedbackKind.PREFER, text="good", created=0.0))
    store.add_feedback("bad", Feedback(kind=FeedbackKind.PREFER, text="lone", created=0.0))
    store.add_feedback("bad", Feedback(kind=FeedbackKind.PREFER, text="nobody", created=0.0))
    found = log_pairs(store)
    assert named(found.pairs) == {("bad", "good")}
    assert found.pairs[0].source == "feedback"
    assert found.refused["preferred to a run of another task"] == 1
    assert found.refused["preferred to a run that is not in the log, or refused"] == 1
    assert named(log_pairs(store, sources=["graded"]).pairs) == {("good", "bad")}


def test_runs_that_people_liked_are_preferred_to_those_that_they_did_not(tmp_path: Path) -> None:
    store = logged(tmp_path, *(run(name, None) for name in ("liked", "disliked", "neither")))
    for name, value in (("liked", 1.0), ("disliked", -1.0), ("neither", 0.0)):
        store.add_feedback(name, Feedback(kind=FeedbackKind.THUMB, value=value, created=0.0))
    assert named(log_pairs(store).pairs) == {("liked", "disliked")}


def test_text_only_runs_make_pairs_of_text(tmp_path: Path) -> None:
    store = logged(tmp_path, run("good", 1.0, exact=False), run("bad", 0.0, exact=False))
    (pair,) = log_pairs(store).pairs
    assert pair.exact is None


def test_pairs_survive_their_file(tmp_path: Path) -> None:
    store = logged(tmp_path, run("good", 1.0), run("bad", 0.0))
    pairs = log_pairs(store).pairs
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert tuple(read_pairs(tmp_path / "pairs.jsonl")) == pairs


GOOD = '{"prompt": "Say hi.", "chosen": "hi", "rejected": "no"}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "Say hi.", "chosen": "hi"}', r"pairs\.jsonl:2: rejected: Field required"),
        (
            '{"prompt": "Say hi.", "chosen": "hi", "rejected": "hi"}',
            "2: row: chosen and rejected are the same",
        ),
        ('{"prompt": "Say hi.", "chosen": 3, "rejected": "no"}', "2: chosen: Input should be a valid tuple"),
        (
            '{"prompt": "", "chosen": "a", "rejected": "b", "score": 1}',
            "2: score: Extra inputs are not permitted",
        ),
        ('{"prompt": [], "chosen": "a", "rejected": "b"}', "2: prompt: Tuple should have at least 1 item"),
        (
            '{"prompt": "p", "chosen": [{"role": "user", "content": "a"}], "rejected": "b"}',
            "2: row: chosen holds no assistant message",
        ),
        (
            '{"prompt": "p", "chosen": [{"role": "robot", "content": "a"}], "rejected": "b"}',
            r"2: chosen\.0\.role: Input should be",
        ),
        (
            '{"prompt": "p", "chosen": "a", "rejected": "b", "exact": {"template_hash": "t", "chosen":'
            ' [{"ids": [1, 2], "mask": [0]}], "rejected": [{"ids": [1, 2], "mask": [0, 1]}]}}',
            r"2: exact\.chosen\.0: ids and mask must be of one length",
        ),
        ("not json", "2: row: is not JSON"),
        ("[1]", "2: row: must be a JSON object"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(UsageError, match=said):
        read_pairs(path)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("u:q a:x", "u:q a:y", "q"),
        ("s:a u:q a:x", "s:a u:q a:x u:r a:y", "a q"),
        ("u:q a:x a:z", "u:q a:x", "q"),
    ],
)
def test_without_a_prompt_it_is_what_both_sides_begin_with(
    chosen: str, rejected: str, prompt: str, tmp_path: Path
) -> None:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    sides = {
        name: [{"role": roles[word[0]], "content": word[2:]} for word in words.split()]
        for name, words in (("chosen", chosen), ("rejected", rejected))
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(sides))
    pair = read_pairs(tmp_path / "pairs.jsonl")[0]
    assert " ".join(m.content for m in pair.prompt) == prompt
    assert [len(pair.prompt) + len(side) for side in (pair.chosen, pair.rejected)] == [
        len(sides["chosen"]), len(sides["rejected"])
    ]  # fmt: skip


def test_an_empty_file_of_pairs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    with pytest.raises(UsageError, match="holds no preference pair"):
        read_pairs(tmp_path / "pairs.jsonl")
