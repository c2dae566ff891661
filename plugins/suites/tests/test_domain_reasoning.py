"""Every dataset of reasoning-gym, scored by its own scorer: the oracle earns 1, a wrong answer does not."""

from __future__ import annotations

import pytest

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.types import Split, Task
from nano_suites import reasoning
from nano_suites.checks.scored_answer import ask_scorer
from nano_suites.drawing import make_tasks

CHUNKS = 15


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox()


def one(dataset: str, level: int = 0, split: Split = Split.TRAIN) -> Task:
    (task,) = make_tasks(suite=f"reasoning-gym:{dataset}", levels=[level], n=1, seed=3, split=split)
    return task


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_dataset_scores_its_oracle_and_a_wrong_answer(chunk: int, sandbox: Sandbox) -> None:
    assert len(reasoning.datasets()) >= 100
    for dataset in reasoning.datasets()[chunk::CHUNKS]:
        task = one(dataset)
        hidden = task.hidden
        assert isinstance(hidden, AnswerChecks)
        assert hidden.scorer is not None
        if hidden.answer is not None:
            assert ask_scorer(hidden.scorer, str(hidden.answer), sandbox) == pytest.approx(1), dataset
        wrong = grade(task, files={}, answer="no such answer", sandbox=sandbox)
        assert wrong.reward == 0.0, (dataset, wrong)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_equal_answer_counts_and_a_program_is_tampering(sandbox: Sandbox) -> None:
    task = one("countdown", split=Split.TEST)
    assert isinstance(task.hidden, AnswerChecks)
    assert grade(task, files={}, answer=f"({task.hidden.answer})", sandbox=sandbox).reward == 1.0
    forged = grade(task, files={}, answer="__import__('os').system('true')", sandbox=sandbox)
    assert forged.reward == 0.0
    assert forged.tampering[0].kind == "code_in_answer"
    other = task.hidden.scorer and task.hidden.scorer.model_copy(update={"question": "sha256:0"})
    changed = task.model_copy(update={"hidden": task.hidden.model_copy(update={"scorer": other})})
    assert grade(changed, files={}, answer="1", sandbox=sandbox).reward is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_levels_seeds_and_splits_are_passed_on() -> None:
    assert one("chain_sum", 0).hidden != one("chain_sum", 3).hidden
    assert one("chain_sum", 1) == one("chain_sum", 1)
    suites = {
        split: make_tasks(suite="reasoning-gym", levels=[0], n=8, seed=1, split=split) for split in Split
    }
    assert not {t.family for t in suites[Split.TRAIN]} & {t.family for t in suites[Split.TEST]}
    with pytest.raises(UsageError, match="unknown dataset 'chain_sums' of reasoning-gym; datasets: "):
        one("chain_sums")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'nano-rl-coder\[reasoning-gym\]'"):
        reasoning.Library()
