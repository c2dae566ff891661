"""Promotion: only beyond noise, on tasks that training has not seen, the evidence kept, and a way back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from promoted import NANO, checkpoint

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_rl.checkpoints.evaluate import (
    Conditions,
    Evaluation,
    SuccessInterval,
    TaskOutcome,
    store_evaluation,
)
from nano_rl.checkpoints.promotion import difference, promote, read_history, roll_back
from nano_shared.checkpoint import Manifest, TrainedOn, latest_checkpoint, write_manifest
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.files import checkpoints_dir, file_hash
from nano_shared.types import Split, Task
from nano_suites.drawing import make_tasks

pytest_plugins = ["command_lines"]
pytestmark = pytest.mark.usefixtures("home")


def evaluated(
    folder: Path,
    outcomes: dict[str, list[float]],
    *,
    split: Split = Split.TEST,
    seed: int = 0,
    program: str | None = None,
) -> Evaluation:
    """An evaluation as `nano-rl eval` keeps it: suite -> the outcome of each of its tasks."""
    tasks = tuple(
        TaskOutcome(
            id=f"{suite}-{i}", key=f"{suite}-{i}", suite=suite, split=split, runs=("r",), seeds=(0,),
            outcomes=(value,), cluster=program,
        )
        for suite, values in outcomes.items()
        for i, value in enumerate(values)
    )  # fmt: skip
    conditions = Conditions(
        tasks_hash="sha256:tasks", seed=seed, repeat=1, temperature=0, max_tokens=9, dtype="float32"
    )
    evaluation = Evaluation(
        id=f"e-{folder.name}-{seed}", created=1.0, model=folder.name,
        manifest_hash=file_hash(folder / "manifest.json"), log="log.db", conditions=conditions,
        success=SuccessInterval(mean=0, low=0, high=1), tasks=tasks,
    )  # fmt: skip
    store_evaluation(evaluation)
    return evaluation


def test_better_beyond_noise_is_promoted_with_its_evidence(nano: NANO) -> None:
    old, new = checkpoint("old"), checkpoint("new", parent="old")
    promote(old, forced=True)
    evaluated(old, {"a": [0] * 12 + [1] * 8})
    evaluated(new, {"a": [1] * 20})
    code, out, _ = nano("checkpoints", "promote", "new")
    assert code == 0
    assert "difference: +60.0%" in out
    assert latest_checkpoint() == new
    record = read_history()[-1]
    assert record.kind == "promoted"
    assert record.evidence is not None
    assert (record.evidence.candidate, record.evidence.baseline) == ("e-new-0", "e-old-0")
    assert record.evidence.overall.low > 0
    assert record.evidence.conditions.tasks_hash == "sha256:tasks"
    shown = json.loads(nano("checkpoints", "show", "new", "--json")[1])
    assert shown["promotions"][0]["evidence"]["overall"]["mean"] == 0.6
    assert "promoted, nano" in nano("checkpoints", "show", "new")[1]


def test_tasks_of_one_program_are_one_observation(nano: NANO) -> None:
    old, new = checkpoint("old"), checkpoint("new", parent="old")
    promote(old, forced=True)
    evaluated(old, {"a": [0] * 12 + [1] * 8}, program="p")
    evaluated(new, {"a": [1] * 20}, program="p")
    code, out, _ = nano("checkpoints", "promote", "new")
    assert code == 1
    assert "not better than old beyond noise" in out
    assert "20 tasks of one program, which give no interval" in out


def test_within_noise_is_not_promoted_and_force_says_so(nano: NANO) -> None:
    old, new = checkpoint("old"), checkpoint("new")
    promote(old, forced=True)
    evaluated(old, {"a": [0] * 10 + [1] * 10})
    evaluated(new, {"a": [0] * 6 + [1] * 14})  # four tasks more: the bootstrap's interval alone is above 0
    code, out, _ = nano("checkpoints", "promote", "new")
    assert code == 1
    assert "not better than old beyond noise" in out
    assert latest_checkpoint() == old
    code, out, _ = nano("checkpoints", "promote", "new", "--force")
    assert (code, latest_checkpoint()) == (0, new)
    assert "by force, which is recorded" in out
    record = read_history()[-1]
    assert record.kind == "forced"
    assert record.evidence is not None
    assert "beyond noise" in record.objections[0]


def test_a_regression_on_one_suite_stops_a_promotion(nano: NANO) -> None:
    old, new = checkpoint("old"), checkpoint("new")
    promote(old, forced=True)
    evaluated(old, {"functions": [0] * 40, "shell": [1] * 10})
    evaluated(new, {"functions": [1] * 40, "shell": [1] * 2 + [0] * 8})
    code, out, _ = nano("checkpoints", "promote", "new", "--json")
    assert code == 1
    report = json.loads(out)
    assert report["evidence"]["overall"]["low"] > 0
    (objection,) = report["objections"]
    assert "worse on suite shell: -80.0%" in objection


def test_tasks_that_training_has_seen_are_no_evidence(nano: NANO) -> None:
    old = checkpoint("old")
    seen = TrainedOn(runs=1, tasks=1, task_ids=("a-3",))
    checkpoint("middle", trained_on=seen)
    new = checkpoint("new", parent="middle")
    promote(old, forced=True)
    evaluated(old, {"a": [0] * 20})
    evaluated(new, {"a": [1] * 20})
    code, out, _ = nano("checkpoints", "promote", "new")
    assert code == 1
    assert "checkpoint middle was trained on 1 of the tasks" in out

    other = checkpoint("other")
    evaluated(old, {"a": [0] * 20}, split=Split.TRAIN, seed=7)
    evaluated(other, {"a": [1] * 20}, split=Split.TRAIN, seed=7)
    code, out, _ = nano("checkpoints", "promote", "other")
    assert code == 1
    assert "20 of the 20 tasks are of the split train" in out


def test_a_newer_comparison_on_train_tasks_does_not_hide_the_one_that_counts(nano: NANO) -> None:
    old, new = checkpoint("old"), checkpoint("new")
    promote(old, forced=True)
    for split, seed in ((Split.TEST, 1), (Split.TRAIN, 2)):
        evaluated(old, {"a": [0] * 20}, split=split, seed=seed)
        evaluated(new, {"a": [1] * 20}, split=split, seed=seed)
    code, out, _ = nano("checkpoints", "promote", "new")
    assert (code, latest_checkpoint()) == (0, new)
    assert "stored besides: 1 other" in out


def test_without_evidence_the_command_that_makes_it_is_said(nano: NANO) -> None:
    promote(checkpoint("old"), forced=True)
    checkpoint("new")
    code, _, err = nano("checkpoints", "promote", "new")
    assert code == 2
    assert "nano-rl eval --model new --against old" in err
    code, out, _ = nano("checkpoints", "promote", "new", "--force")
    assert code == 0
    assert "there was no evidence" in out
    assert read_history()[-1].objections == ("there was no evidence",)


def test_other_conditions_do_not_compare(nano: NANO) -> None:
    old, new = checkpoint("old"), checkpoint("new")
    promote(old, forced=True)
    evaluated(old, {"a": [0] * 20}, seed=1)
    evaluated(new, {"a": [1] * 20}, seed=2)
    assert nano("checkpoints", "promote", "new")[0] == 2


def test_a_reward_model_and_a_damaged_checkpoint_are_not_promoted(nano: NANO) -> None:
    checkpoint("judge", kind="reward_model")
    code, _, err = nano("checkpoints", "promote", "judge", "--force")
    assert code == 2
    assert "is a reward model" in err
    (checkpoint("torn") / "weights").write_text("other")
    code, _, err = nano("checkpoints", "promote", "torn", "--force")
    assert code == 2
    assert "weights is corrupt" in err
    assert latest_checkpoint() is None


def test_rollback_goes_back_one_by_one_or_to_a_name(nano: NANO) -> None:
    one, two, three = (checkpoint(name) for name in ("one", "two", "three"))
    for folder in (one, two, three):
        promote(folder, forced=True)
    assert "three is no longer promoted; two is" in nano("checkpoints", "rollback")[1]
    assert latest_checkpoint() == two
    assert nano("checkpoints", "rollback")[0] == 0
    assert latest_checkpoint() == one
    assert "the shipped policy" in nano("checkpoints", "rollback")[1]
    assert latest_checkpoint() is None
    assert nano("checkpoints", "rollback")[0] == 2
    for folder in (one, two, three):
        promote(folder, forced=True)
    roll_back("one")
    assert latest_checkpoint() == one
    with pytest.raises(UsageError, match="three was not promoted before one"):
        roll_back("three")
    kinds = [record.kind for record in read_history()]
    assert kinds == ["forced"] * 3 + ["rolled_back"] * 3 + ["forced"] * 3 + ["rolled_back"]
    assert len(json.loads(nano("checkpoints", "history", "--json")[1])) == 10


def test_rollback_to_a_checkpoint_that_is_gone_says_so() -> None:
    one, two = checkpoint("one"), checkpoint("two")
    promote(one, forced=True)
    promote(two, forced=True)
    one.rename(one.with_name("away"))
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        roll_back()
    assert latest_checkpoint() == two


@pytest.mark.some(1)
@pytest.mark.parametrize("at", ["before the history", "before the pointer"])
def test_kill_9_in_a_promotion_leaves_the_old_one_whole(at: str) -> None:
    old, new = checkpoint("old"), checkpoint("new")
    promote(old, forced=True)
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "import nano_rl.checkpoints.promotion as history\n"
        "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
        "setattr(history, 'write_text' if sys.argv[2] == 'before the history' else 'point_latest', die)\n"
        "history.promote(Path(sys.argv[1]), forced=True)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(new), at], check=False, env=os.environ.copy())
    assert killed.returncode == -signal.SIGKILL
    assert latest_checkpoint() == old
    assert [record.name for record in read_history()] == ["old"]
    promote(new, forced=True)
    assert latest_checkpoint() == new
    assert [record.name for record in read_history()] == ["old", "new"]
    roll_back()
    assert latest_checkpoint() == old


def test_a_damaged_history_is_said(nano: NANO) -> None:
    promote(checkpoint("old"), forced=True)
    (checkpoints_dir() / "promotions.json").write_text("{")
    code, _, err = nano("checkpoints", "history")
    assert code == 2
    assert "promotions.json is damaged" in err


def test_the_lineage_is_told_up_to_the_base_and_where_it_breaks(nano: NANO) -> None:
    tasks = [Task(key=str(n), prompt="p", split=Split.TRAIN) for n in range(3)]
    checkpoint("first", trained_on=TrainedOn.of(["a", "b"], tasks))
    checkpoint("second", parent="first", config={"learning_rate": 0.5}, metrics={"loss": 0.25})
    out = nano("checkpoints", "show", "second")[1]
    assert "from first: trained on 2 logged runs, 3 tasks (split train)" in out
    assert "from base, the base" in out
    assert "learning_rate = 0.5" in out
    assert "loss = 0.25" in out
    steps = json.loads(nano("checkpoints", "show", "second", "--json")[1])["lineage"]
    assert [step["name"] for step in steps] == ["second", "first", "base"]

    (checkpoints_dir() / "first" / "manifest.json").write_text("{")
    code, out, _ = nano("checkpoints", "show", "second")
    assert code == 0
    assert "manifest.json is corrupt" in out
    out = nano("checkpoints", "list")[1]
    assert "manifest.json is corrupt" in out
    assert "second  from first  not evaluated" in out
    (checkpoints_dir() / "first").rename(checkpoints_dir() / ".gone")
    assert "first: is not at hand" in nano("checkpoints", "show", "second")[1]
    checkpoint("loop", parent="loop")
    assert "is named as its own ancestor" in nano("checkpoints", "show", "loop")[1]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=12))
def test_a_difference_is_never_better_and_worse_and_needs_six_changed_tasks(values: list[float]) -> None:
    found = difference("x", [(str(place), value) for place, value in enumerate(values)])
    mirrored = difference("x", [(str(place), -value) for place, value in enumerate(values)])
    assert not (found.better and found.worse)
    assert found.low <= found.mean <= found.high
    assert (found.better, found.worse) == (mirrored.worse, mirrored.better)
    if found.changed < 6:
        assert not found.better


def test_eval_and_promote_on_tasks_with_real_models(home: Path, nano: NANO) -> None:
    """Two tiny models, evaluated and kept; as equals neither beats the other, and repeats are seeded."""
    torch.set_num_threads(1)
    tasks = make_tasks(levels=[0], n=2, seed=1, split=Split.TEST, views=["copy"])
    file = home.parent / "tasks.jsonl"
    file.write_text("".join(task.model_dump_json() + "\n" for task in tasks))
    texts = [m.content for t in tasks for m in first_messages(COMPACT_1, t, ())]
    for name in ("one", "two"):
        folder = build_tiny(
            checkpoints_dir() / name, texts, hidden=32, layers=1, max_positions=200, vocab_size=300
        )
        template = (folder / "chat_template.jinja").read_text()
        assert template
        fields = {
            "name": name, "kind": "full", "base_model": "base", "parent": "base", "profile": COMPACT_1.name,
            "profile_hash": COMPACT_1.hash, "template_hash": "t", "tools_hash": COMPACT_1.tools_hash,
            "code_version": "1", "created": 1.0,
        }  # fmt: skip
        write_manifest(folder, Manifest.model_validate(fields))
    how = (
        "--tasks",
        file,
        "--temperature",
        "1",
        "--repeat",
        "2",
        "--limit",
        "max_completion_tokens=8",
        "--seed",
        "3",
    )
    code, out, _ = nano("eval", "--model", "one", *how, "--json")
    assert code == 0
    report = json.loads(out)
    kept = json.loads((home / "evaluations" / f"{report['evaluation']}.json").read_text())
    assert (report["rows"][0]["graded"], kept["conditions"]["repeat"]) == (4, 2)
    assert all(len(set(task["seeds"])) == 2 for task in kept["tasks"])
    assert nano("eval", "--model", "two", "--against", "one", *how)[0] == 0
    code, out, _ = nano("checkpoints", "promote", "two", "--against", "one")
    assert code == 1
    assert "not better than one beyond noise: +0.0%" in out
    assert "two is not promoted" in out
    assert "0.0% (0.0% to" in nano("checkpoints", "list")[1]
    assert len(list((home / "evaluations").iterdir())) == 3
    code, _, err = nano("eval", "--model", "one", "--tasks", file, "--repeat", "2")
    assert code == 2
    assert "--repeat needs a --temperature" in err
