"""A log with planted damage: each kind is found, named with its own code, and never trained on."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import ADD, FAIL, SECOND, SOLVE, build_model, recorded, relogged

from nano_coder.models.opening import OpenedWeights, open_weights
from nano_coder.verify.trainable import RefusalCode
from nano_rl.config import TrainConfig
from nano_rl.imitation import logged_successes, reader_of
from nano_rl.logs.admission import RunVerifier, TargetPolicy, Use, survey
from nano_rl.logs.logged_groups import lineage, read_logs
from nano_shared.errors import LogError
from nano_shared.run_facts import RunFilter
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, StopReason, ToolCall, Trajectory, Trust
from nano_suites.impossible import impossible

torch.set_num_threads(1)
BAD = "the-damaged-run"


@dataclass(frozen=True)
class Recorded:
    folder: Path
    opened: OpenedWeights
    passed: Trajectory
    failed: Trajectory
    third: Trajectory
    """another pass of the same task, which is damaged in each test"""
    other: Trajectory
    """of another task"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    opened = open_weights(str(build_model(folder / "model")))
    runs = recorded(opened, folder, SOLVE, FAIL, SOLVE)
    (other,) = recorded(opened, folder, SOLVE, task=SECOND)
    assert [run.reward for run in runs] == [1.0, 0.0, 1.0]
    return Recorded(folder, opened, *runs, other)


# ------------------------------------------------------------------------------- damage by a bad writer


def turn(run: Trajectory, at: int, **changes: Any) -> Trajectory:
    turns = list(run.turns)
    turns[at] = turns[at].model_copy(update=changes)
    return run.model_copy(update={"turns": tuple(turns)})


def completion(run: Trajectory, at: int, **changes: Any) -> Trajectory:
    return turn(run, at, completion=run.turns[at].completion.model_copy(update=changes))


def tokens(run: Trajectory, at: int, **changes: Any) -> Trajectory:
    old = run.turns[at].completion.tokens
    assert old is not None
    return completion(run, at, tokens=old.model_copy(update=changes))


def parts(run: Trajectory, at: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    old = run.turns[at].completion.tokens
    assert old is not None
    return old.context_ids, old.sampled_ids, old.logprobs


def judged(run: Trajectory, **changes: Any) -> Trajectory:
    assert run.verdict is not None
    return run.model_copy(update={"verdict": run.verdict.model_copy(update=changes)})


def mask_begins_early(log: Recorded) -> Trajectory:
    context, sampled, logprobs = parts(log.third, 1)
    return tokens(
        log.third, 1, context_ids=context[:-1], sampled_ids=(context[-1], *sampled),
        logprobs=(-0.1, *logprobs),
    )  # fmt: skip


def mask_begins_late(log: Recorded) -> Trajectory:
    context, sampled, logprobs = parts(log.third, 1)
    return tokens(
        log.third, 1, context_ids=(*context, sampled[0]), sampled_ids=sampled[1:], logprobs=logprobs[1:]
    )


def ids_swapped(log: Recorded) -> Trajectory:
    _, sampled, _ = parts(log.third, 1)
    at = next(i for i in range(len(sampled) - 2) if sampled[i] != sampled[i + 1])
    swapped = (*sampled[:at], sampled[at + 1], sampled[at], *sampled[at + 2 :])
    return tokens(log.third, 1, sampled_ids=swapped)


def prefix_broken(log: Recorded) -> Trajectory:
    context, _, _ = parts(log.third, 1)
    return tokens(
        log.third, 1, context_ids=(*context[: len(context) // 2], *context[len(context) // 2 + 1 :])
    )


def prompt_of_another_task(log: Recorded) -> Trajectory:
    return tokens(log.third, 0, context_ids=parts(log.other, 0)[0])


def assistant_turn_read(log: Recorded) -> Trajectory:
    """Somebody's answer lies in what was read, as if the policy had given it before."""
    encoder = reader_of(log.opened).template.encoder
    text = "<|im_start|>assistant\n@read_file path=sums.py<|im_end|>\n"
    planted = tuple(encoder.rendered(text, "\U000f0000"))
    context, _, _ = parts(log.third, 1)
    return tokens(log.third, 1, context_ids=(*planted, *context))


def assistant_turn_written(log: Recorded) -> Trajectory:
    """The text of a turn and its calls were rewritten, and its tokens left as they were."""
    text = "@read_file path=test_sums.py"
    calls = (ToolCall(name="read_file", arguments={"path": "test_sums.py"}),)
    return turn(completion(log.third, 0, text=text), 0, calls=calls)


def logprobs_invented(log: Recorded) -> Trajectory:
    _, sampled, _ = parts(log.third, 2)
    return tokens(log.third, 2, logprobs=(-0.01,) * len(sampled))


def end_of_turn_lost(log: Recorded) -> Trajectory:
    _, sampled, logprobs = parts(log.third, 2)
    return tokens(log.third, 2, sampled_ids=sampled[:-1], logprobs=logprobs[:-1])


def turn_truncated(log: Recorded) -> Trajectory:
    _, sampled, logprobs = parts(log.third, 1)
    return tokens(log.third, 1, sampled_ids=sampled[:4], logprobs=logprobs[:4])


def redacted_text_alone(log: Recorded) -> Trajectory:
    text = log.third.turns[1].completion.text.replace("a + b", "[redacted:key]")
    calls = log.third.turns[1].calls
    told = {name: v.replace("a + b", "[redacted:key]") if isinstance(v, str) else v
            for name, v in calls[0].arguments.items()}  # fmt: skip
    return turn(
        completion(log.third, 1, text=text), 1, calls=(calls[0].model_copy(update={"arguments": told}),)
    )


def retasked(run: Trajectory, **changes: Any) -> Trajectory:
    return run.model_copy(update={"task": run.task.model_copy(update=changes)})


WRITERS: dict[str, tuple[RefusalCode, Callable[[Recorded], Trajectory]]] = {
    "mask begins a token early": (RefusalCode.SHIFTED_MASK, mask_begins_early),
    "mask begins a token late": (RefusalCode.SHIFTED_MASK, mask_begins_late),
    "two ids swapped": (RefusalCode.OTHER_IDS, ids_swapped),
    "a context token lost": (RefusalCode.BROKEN_PREFIX, prefix_broken),
    "the prompt of another task": (RefusalCode.BROKEN_PREFIX, prompt_of_another_task),
    "token rows out of order": (RefusalCode.BROKEN_ROWS, lambda log: tokens(log.third, 0, row=1)),
    "an assistant turn read": (RefusalCode.FABRICATED_TURN, assistant_turn_read),
    "an assistant turn rewritten": (RefusalCode.OTHER_IDS, assistant_turn_written),
    "log-probs invented": (RefusalCode.OTHER_LOGPROBS, logprobs_invented),
    "the end of a turn lost": (RefusalCode.CUT_TURN, end_of_turn_lost),
    "a turn truncated": (RefusalCode.CUT_TURN, turn_truncated),
    "redacted in the text alone": (RefusalCode.MISALIGNED, redacted_text_alone),
    "another call than the text's": (
        RefusalCode.CALLS_DIFFER, lambda log: turn(log.third, 0, calls=(ToolCall(name="submit"),))
    ),
    "another template": (
        RefusalCode.ANOTHER_TEMPLATE, lambda log: log.third.model_copy(update={"template_hash": "sha256:0"})
    ),
    "another tool hash": (
        RefusalCode.OTHER_TOOLS, lambda log: log.third.model_copy(update={"tools_hash": "sha256:0"})
    ),
    "another profile hash": (
        RefusalCode.OTHER_PROFILE, lambda log: log.third.model_copy(update={"profile_hash": "sha256:0"})
    ),
    "another policy's name on a turn": (
        RefusalCode.MIXED_POLICIES, lambda log: completion(log.third, 1, policy_id="another")
    ),
    "a version that goes back": (
        RefusalCode.MIXED_POLICIES, lambda log: completion(log.third, 0, policy_version=5)
    ),
    "a failure of ours scored 0": (
        RefusalCode.OURS_SCORED,
        lambda log: judged(log.third, reward=0.0).model_copy(update={"stop": StopReason.SANDBOX_ERROR}),
    ),
    "a failure of the grader scored 0": (
        RefusalCode.OURS_SCORED,
        lambda log: judged(log.third, reward=0.0, failure_kind="verifier_error: gone"),
    ),
    "the verdict of another run": (
        RefusalCode.FOREIGN_VERDICT, lambda log: log.third.model_copy(update={"verdict": log.failed.verdict})
    ),
    "a run logged twice": (RefusalCode.DUPLICATE, lambda log: log.passed),
    "ids missing": (RefusalCode.MISSING_IDS, lambda log: tokens(log.third, 1, context_ids=())),
    "no tokens": (RefusalCode.TEXT_ONLY, lambda log: completion(log.third, 1, tokens=None)),
    "greedy": (RefusalCode.GREEDY, lambda log: completion(log.third, 0, sampling=Sampling(temperature=0))),
    "top-p": (
        RefusalCode.TRUNCATED_SAMPLING, lambda log: completion(log.third, 0, sampling=Sampling(top_p=0.9))
    ),
    "unfinished": (RefusalCode.UNFINISHED, lambda log: log.third.model_copy(update={"stop": None})),
    "a judge's verdict": (RefusalCode.LOW_TRUST, lambda log: judged(log.third, trust=Trust.JUDGE)),
    "no reward": (RefusalCode.NO_REWARD, lambda log: judged(log.third, reward=None)),
    "no verdict": (RefusalCode.NO_VERDICT, lambda log: log.third.model_copy(update={"verdict": None})),
    "held out": (RefusalCode.TEST_SPLIT, lambda log: retasked(log.third, key="held", split=Split.TEST)),
    "impossible": (RefusalCode.CONTROL, lambda log: log.third.model_copy(update={"task": impossible(ADD)})),
}  # fmt: skip
NEEDS_TOKENIZER = {
    RefusalCode.SHIFTED_MASK, RefusalCode.OTHER_IDS, RefusalCode.BROKEN_PREFIX, RefusalCode.FABRICATED_TURN,
    RefusalCode.OTHER_LOGPROBS, RefusalCode.CUT_TURN, RefusalCode.MISALIGNED, RefusalCode.FOREIGN_VERDICT,
    RefusalCode.ANOTHER_TEMPLATE,
}  # fmt: skip


def bench_of(log: Recorded, look: RunVerifier) -> TargetPolicy:
    return TargetPolicy(profile=log.opened.profile, template_hash=look.template_hash, version=0)


def found(store: LogStore, log: Recorded, *, model: bool = True) -> dict[str, int]:
    look = RunVerifier(log.opened, store)
    bench = bench_of(log, look) if model else TargetPolicy()
    report = survey(store, RunFilter(), bench, look if model else None, exact=True)
    return dict(report.refusals)


def trained_on(store: LogStore, log: Recorded) -> set[str]:
    look = RunVerifier(log.opened, store)
    config = TrainConfig(group_size=0)
    return read_logs([store], log.opened, look.template_hash, lineage(log.opened), config).usable


@pytest.mark.some(4)
@pytest.mark.parametrize("damage", WRITERS)
def test_what_a_bad_writer_logs_is_named_and_not_trained_on(
    damage: str, log: Recorded, tmp_path: Path
) -> None:
    code, plant = WRITERS[damage]
    bad = plant(log).model_copy(update={"id": BAD, "started": log.failed.started + 1})
    with relogged([log.passed, log.failed, bad], log.folder, tmp_path) as store:
        assert found(store, log) == {code.value: 1}
        assert trained_on(store, log) == {log.passed.id, log.failed.id}
        if code not in NEEDS_TOKENIZER:
            assert found(store, log, model=False) == {code.value: 1}


def test_without_damage_nothing_is_refused(log: Recorded, tmp_path: Path) -> None:
    runs = [log.passed, log.failed, log.third]
    with relogged(runs, log.folder, tmp_path) as store:
        assert found(store, log) == {}
        assert trained_on(store, log) == {run.id for run in runs}


# ------------------------------------------------------------------------------- damage to the rows

NAN, ABOVE = struct.pack("<d", float("nan")).hex(), struct.pack("<d", 0.5).hex()
WHERE = f"WHERE run_id = '{BAD}' AND turn = 1"
ROWS: dict[str, tuple[RefusalCode, tuple[str, ...]]] = {
    "a log-prob is missing": (
        RefusalCode.MISSING_LOGPROBS,
        (f"UPDATE log_turns SET logprobs = substr(logprobs, 1, length(logprobs) - 8) {WHERE}",),
    ),
    "a log-prob is NaN": (
        RefusalCode.NAN_LOGPROB,
        (f"UPDATE log_turns SET logprobs = CAST(x'{NAN}' || substr(logprobs, 9) AS BLOB) {WHERE}",),
    ),
    "a log-prob is positive": (
        RefusalCode.POSITIVE_LOGPROB,
        (f"UPDATE log_turns SET logprobs = CAST(x'{ABOVE}' || substr(logprobs, 9) AS BLOB) {WHERE}",),
    ),
    "a turn is torn": (
        RefusalCode.TORN_TURN,
        (
            "UPDATE log_turns SET sampled_ids = substr(sampled_ids, 1, length(sampled_ids) - 4), "
            f"logprobs = substr(logprobs, 1, length(logprobs) - 8) {WHERE}",
        ),
    ),
    "half an id is gone": (
        RefusalCode.TORN_TURN,
        (f"UPDATE log_turns SET context_ids = substr(context_ids, 1, length(context_ids) - 2) {WHERE}",),
    ),
    "a turn is gone": (
        RefusalCode.MISSING_TURN, (f"DELETE FROM log_tool_calls {WHERE}", f"DELETE FROM log_turns {WHERE}")
    ),
    "every turn is gone": (
        RefusalCode.NO_TURNS,
        (f"DELETE FROM log_tool_calls WHERE run_id = '{BAD}'",
         f"DELETE FROM log_turns WHERE run_id = '{BAD}'"),
    ),
    "a stop that nobody knows": (
        RefusalCode.UNFINISHED, (f"UPDATE log_runs SET stop = 'vanished' WHERE id = '{BAD}'",)
    ),
}  # fmt: skip


@pytest.mark.some(4)
@pytest.mark.parametrize("damage", ROWS)
def test_what_happened_to_the_rows_is_named_and_not_trained_on(
    damage: str, log: Recorded, tmp_path: Path
) -> None:
    code, statements = ROWS[damage]
    bad = log.third.model_copy(update={"id": BAD})
    with relogged([log.passed, log.failed, bad], log.folder, tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / "log.db")) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()
        assert found(store, log) == found(store, log, model=False) == {code.value: 1}
        assert trained_on(store, log) == {log.passed.id, log.failed.id}
        if code.damage:
            imitated, refused = logged_successes(store, reader_of(log.opened))
            assert [run.id for run in imitated] == [log.passed.id]
            assert refused[code.value] == 1


def test_a_run_that_cannot_be_loaded_says_so(log: Recorded, tmp_path: Path) -> None:
    with relogged([log.third.model_copy(update={"id": BAD})], log.folder, tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / "log.db")) as connection:
            connection.execute(ROWS["a log-prob is NaN"][1][0])
            connection.commit()
        with pytest.raises(LogError, match=f"run {BAD} is damaged in the log .*log verify {BAD}"):
            store.get(BAD)


def test_a_damaged_run_teaches_nothing_and_a_text_only_success_imitates(
    log: Recorded, tmp_path: Path
) -> None:
    bare = completion(log.third, 0, tokens=None).model_copy(update={"id": "bare"})
    bad = ids_swapped(log).model_copy(update={"id": BAD})
    with relogged([log.passed, log.failed, bare, bad], log.folder, tmp_path) as store:
        look = RunVerifier(log.opened, store)
        uses = survey(store, RunFilter(), bench_of(log, look), look, exact=True).uses
    assert uses == {Use.POLICY_GRADIENT.value: 2, Use.IMITATION.value: 1, Use.NOTHING.value: 1}


def test_every_code_says_what_it_means() -> None:
    assert all(code.meaning and code.meaning != code.value for code in RefusalCode)
