"""One training of all that a log can teach: policy gradient, imitation, preference; and it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import CONFIG, Loop, logged_groups, runtime_at, same, scored, tiny_model

from nano_coder.models.opening import OpenedWeights, local_policy, open_weights
from nano_preferences.log_pairs import pair_of, pairs_beside
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Sources
from nano_rl.learn import train_step
from nano_rl.learn.config import GuardConfig, LogsConfig
from nano_rl.learn.groups import Group
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.logs.logged_groups import LogContents, lineage, read_logs
from nano_rl.training_record import learned_from
from nano_shared.errors import GuardTripped
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Trajectory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def groups(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, ...]:
    """Two tasks, four runs of each, every other one of which passed."""
    return logged_groups(tiny, tmp_path_factory.mktemp("log") / "log.db", (0.0, 1.0, 0.0, 1.0))


def passed(run: Trajectory) -> Trajectory:
    """The run as if it had been readable and had ended by itself, its verdict with a component, as graders
    give them."""
    assert run.verdict is not None
    told = run.verdict.model_copy(update={"components": {"tests": run.verdict.reward}})
    turns = tuple(turn.model_copy(update={"parse_error": None, "observations": ()}) for turn in run.turns)
    return run.model_copy(update={"verdict": told, "stop": StopReason.FINISHED, "turns": turns})


def bare(run: Trajectory) -> Trajectory:
    """The run as a backend without token ids would have logged it."""
    turns = tuple(
        turn.model_copy(update={"completion": turn.completion.model_copy(update={"tokens": None})})
        for turn in run.turns
    )
    return run.model_copy(update={"turns": turns})


@pytest.fixture
def log(groups: tuple[Group, ...], tmp_path: Path) -> Path:
    """The first task's runs as they are; of the second, text alone."""
    path = tmp_path / "given.db"
    with LogStore.open(path) as store:
        for group, change in zip(groups, (lambda run: run, bare), strict=True):
            for run in group.trajectories:
                store.append(change(passed(run)))
    return path


def contents(log: Path, tiny: Path, config: TrainConfig) -> tuple[OpenedWeights, LogContents]:
    opened = open_weights(str(tiny))
    template = local_policy(opened.loaded, opened.profile).template_hash
    with LogStore.open(log) as store:
        return opened, read_logs([store], opened, template, lineage(opened), config)


def sources(of: LogContents, log: Path, config: TrainConfig) -> Sources:
    with LogStore.open(log) as store:
        pairs = pairs_beside([store], {run.id for run in of.rest}, of.usable, config)
    return Sources(
        logged=of.groups, policy_versions=of.policy_versions, rest=of.rest, pairs=pairs, pair_of=pair_of
    )


MIXED = CONFIG.model_copy(
    update={
        "group_size": 0, "lambda_sft": 0.1, "imitate": "rest", "steps": 3,
        "logs": LogsConfig(uses=3, lambda_preference=0.2),
        "objective": ObjectiveConfig(objective="reinforce"),
    }
)  # fmt: skip


def test_what_policy_gradients_may_not_use_is_imitated_and_compared_in_the_same_run(
    log: Path, tiny: Path, tmp_path: Path
) -> None:
    _, held = contents(log, tiny, MIXED)
    assert (held.runs, len(held.rest), held.refused) == (4, 4, {"text-only": 4})
    given = sources(held, log, MIXED)
    assert 1 <= len(given.pairs) <= 2
    loop = Loop(tiny, tmp_path / "a")
    loop.go(MIXED, sources=given, score=None)
    rows = read_metrics(tmp_path / "a" / METRICS)
    for row in rows:
        shares = [row[f"share_{part}"] for part in ("policy", "kl", "sft", "preference")]
        assert sum(share for share in shares if share is not None) == pytest.approx(1)
        assert row["sft_tokens"]
        assert row["preference_pairs"] == min(2, len(given.pairs))
    # nothing has moved before the first update: no side has gained on the other
    assert rows[0]["preference_margin"] == 0
    assert rows[-1]["preference_margin"] != 0
    used = set(loop.used)
    assert {run.id for group in held.groups for run in group.members} <= used
    assert {pair.chosen_run for pair in given.pairs} <= used

    told = learned_from(rows)
    assert told["logged_runs"] == 12
    assert told["preference_pairs"] == sum(row["preference_pairs"] or 0 for row in rows)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("fresh", [0, 3])
def test_a_stopped_training_from_logs_goes_on_bit_for_bit(
    log: Path, tiny: Path, tmp_path: Path, fresh: int
) -> None:
    config = MIXED.model_copy(update={"group_size": fresh})
    _, held = contents(log, tiny, config)
    given = sources(held, log, config)
    whole, halved = Loop(tiny, tmp_path / "a"), Loop(tiny, tmp_path / "b")
    expected = whole.go(config, sources=given)
    halved.go(config, sources=given, steps=1)
    # the log has grown since: what is left of it would be paired otherwise
    newer = [passed(run).model_copy(update={"id": f"newer-{run.id}"}) for run in held.rest]
    grown = replace(given, rest=(*newer, *given.rest), pairs=())
    assert same(halved.go(config, sources=grown, resume=True), expected)
    told = [read_metrics(folder / METRICS) for folder in (tmp_path / "a", tmp_path / "b")]
    seen = [[(row["logged_runs"], row["log_left"], row["loss"]) for row in rows] for rows in told]
    assert seen[0] == seen[1]


def test_a_log_without_tokens_trains_by_what_is_left_alone(
    groups: tuple[Group, ...], tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "texts.db"
    with LogStore.open(path) as store:
        for run in (run for group in groups for run in group.trajectories):
            store.append(bare(passed(run)))
    _, held = contents(path, tiny, MIXED)
    assert held.groups == ()
    Loop(tiny, tmp_path / "a").go(MIXED, sources=sources(held, path, MIXED), score=None)
    rows = read_metrics(tmp_path / "a" / METRICS)
    assert len(rows) == 3
    assert all(row["share_sft"] and row["sft_tokens"] and not row["logged_runs"] for row in rows)


def drawn_anew(run: Trajectory) -> Trajectory:
    """The same run as another seed drew it."""
    turns = []
    for turn in run.turns:
        sampling = turn.completion.sampling.model_copy(update={"seed": 12345})
        completion = turn.completion.model_copy(update={"sampling": sampling})
        turns.append(turn.model_copy(update={"completion": completion}))
    return run.model_copy(update={"turns": tuple(turns)})


def test_a_task_whose_content_changed_under_its_key_keeps_its_newest(
    log: Path, groups: tuple[Group, ...], tiny: Path
) -> None:
    old = groups[0].trajectories[0]
    other = old.task.model_copy(update={"prompt": "Something else."})
    with LogStore.open(log) as store:
        store.append(
            drawn_anew(passed(old)).model_copy(update={"id": "older", "task": other, "started": 1.0})
        )
    _, held = contents(log, tiny, CONFIG)
    assert held.refused["task has changed"] == 1
    assert "older" not in held.policy_versions


def nudged(factor: float) -> Callable[[torch.nn.Module], None]:
    def before(model: torch.nn.Module) -> None:
        with torch.no_grad():
            dict(model.named_parameters())["model.norm.weight"].mul_(factor)

    return before


def old(groups: tuple[Group, ...], by: int) -> Sources:
    versions = {run.id: -by for group in groups for run in group.trajectories}
    return Sources(logged=groups, policy_versions=versions)


def test_rows_that_the_policy_has_moved_away_from_leave_by_their_weight(
    groups: tuple[Group, ...], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"group_size": 0, "steps": 1, "score": None, "before": nudged(2.0)}
    monkeypatch.setattr(train_step, "MIN_ESS", 0.0)
    monkeypatch.setattr(train_step, "MAX_DRIFT", None)
    Loop(tiny, tmp_path / "kept").go(sources=old(groups, 4), **settings)
    (row,) = read_metrics(tmp_path / "kept" / METRICS)
    ess = row["ess"]
    assert ess is not None
    assert row["weight_dropped"] == 0
    monkeypatch.setattr(train_step, "MIN_ESS", min(1.0, ess + 0.05))
    Loop(tiny, tmp_path / "bounded").go(sources=old(groups, 4), **settings)
    (row,) = read_metrics(tmp_path / "bounded" / METRICS)
    assert row["ess_logged"] == pytest.approx(ess, rel=1e-3)
    assert row["weight_dropped"]
    assert row["ess_kept"] is not None
    assert row["ess_kept"] >= min(1.0, ess + 0.05)


def test_logs_that_are_all_too_far_stop_the_training_with_a_sentence(
    groups: tuple[Group, ...], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_step, "MIN_ESS", 1.0)
    with pytest.raises(GuardTripped, match="step 1: no logged run of 2 steps is near enough to the policy"):
        Loop(tiny, tmp_path).go(
            sources=old(groups, 4), group_size=0, score=None, before=nudged(30.0), steps=5,
            logs=LogsConfig(uses=None), guards=GuardConfig(patience=2),
        )  # fmt: skip


def test_the_first_step_of_a_policys_own_log_is_not_scored_again(
    groups: tuple[Group, ...], tiny: Path, tmp_path: Path
) -> None:
    Loop(tiny, tmp_path).go(
        sources=Sources(logged=groups), group_size=0, score=None, steps=2, logs=LogsConfig(uses=None)
    )
    first, second = read_metrics(tmp_path / METRICS)
    assert "ess_logged" not in first
    assert first["stale"] == 0
    assert second["ess_logged"] is not None
    assert (second["age_max"], second["stale"]) == (1, 1)


def test_impossible_scores_leave_no_trace(groups: tuple[Group, ...], tiny: Path, tmp_path: Path) -> None:
    unscored = tuple(
        replace(g, trajectories=tuple(scored(run, None) for run in g.trajectories)) for g in groups
    )
    loop = Loop(tiny, tmp_path)
    loop.go(
        sources=Sources(logged=unscored), group_size=0, score=None, steps=1,
        objective=ObjectiveConfig(objective="reinforce"),
    )  # fmt: skip
    (row,) = read_metrics(tmp_path / METRICS)
    assert row["skipped"] == 1
    assert runtime_at(tmp_path / "log.db").store.runs() == []
