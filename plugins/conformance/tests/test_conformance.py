"""The published suite: our losses pass it, and each way in which a loss has been wrong fails it."""

from __future__ import annotations

import importlib
import json
import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import flawed_losses
import pytest
import torch
from flawed_losses import FLAWS, changes_what_it_is_given, flawed, mask_by_product, written_apart
from mutants import MUTANTS, Mutant, killed, subject_of
from typer.testing import CliRunner

from nano_conformance.adapter import OURS, Subject
from nano_conformance.by_hand import rows_of
from nano_conformance.case import ConformanceCheck, Status, run_check
from nano_conformance.grid import CAP, DRIFT, DUAL, FLOOR, HIGH, LOW, drawn_step
from nano_conformance.suite import KINDS, checks
from nano_rl.cli import cli
from nano_shared.errors import UsageError

STD = ("none", "sample", "population")
HERE = str(Path(__file__).parent)


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_our_losses_pass(every: int) -> None:
    """Every check; of the cases of a check one in `every`."""
    thinned = [(kind, replace(check, run=check.cases[::every])) for kind, check in checks()]
    assert min(Counter(kind for kind, _ in thinned)[kind] for kind in KINDS) >= 10
    results = [(kind, run_check(check, OURS)) for kind, check in thinned]
    assert [(kind, r) for kind, r in results if r.status != Status.PASSED] == []


def failures(loss: Callable[..., torch.Tensor], draw: int = 0) -> Iterator[tuple[str, str]]:
    subject = Subject(name="flawed", loss=loss)
    results = ((kind, run_check(check, subject)) for kind, check in checks(draw))
    return ((kind, f"{r.name}: {r.note}") for kind, r in results if r.status == Status.FAILED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grid", "invariances", "credit"])
@pytest.mark.parametrize("draw", [1, 2])
def test_our_losses_pass_on_other_draws(kind: str, draw: int) -> None:
    results = [run_check(check, OURS) for check in KINDS[kind](draw)]
    assert [r for r in results if r.status != Status.PASSED] == []


@pytest.mark.slow
def test_ac_42_a_right_loss_that_was_written_apart_passes() -> None:
    assert list(failures(written_apart)) == []


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("flaw", "objective"),
    [
        # each flaw under the first objective that it is of; under the others on demand
        pytest.param(flaw, objective, marks=[pytest.mark.slow] * (flaw in {f for f, _ in FLAWS[:at]}))
        for at, (flaw, objective) in enumerate(FLAWS)
    ],
)
def test_ac_42_a_flawed_loss_is_found(flaw: str, objective: str) -> None:
    assert next(failures(flawed(flaw, objective)), None)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "flaw", ["never_clips", "weight_of_the_micro_batch", "kl_over_rows", "kl_with_weight"]
)
def test_ac_42_whatever_is_drawn(flaw: str) -> None:
    for draw in (3, 4, 5):
        assert any(
            run_check(check, Subject(name=flaw, loss=flawed(flaw))).status == Status.FAILED
            for check in KINDS["grid"](draw)
        )


@pytest.mark.some(6)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_ac_42_a_mutant_is_killed_by_the_check_that_it_names(mutant: Mutant) -> None:
    assert killed(mutant, draws=[0])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_ac_42_a_mutant_is_killed_in_three_draws(mutant: Mutant) -> None:
    assert len(killed(mutant)) == 3


def test_ac_42_there_are_enough_mutants_and_ours_are_put_back() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    with subject_of(MUTANTS[0]) as changed:
        assert changed.loss is not OURS.loss
    assert importlib.import_module("nano_conformance.adapter").OURS is OURS


@pytest.mark.parametrize(
    ("loss", "kind"), [(mask_by_product, "invariances"), (changes_what_it_is_given, "closed forms")]
)
def test_what_lies_outside_the_mask_and_what_is_changed_in_place(
    loss: Callable[..., torch.Tensor], kind: str
) -> None:
    results = (run_check(check, Subject(name="flawed", loss=loss)) for check in KINDS[kind](0))
    assert any(result.status == Status.FAILED for result in results)


def test_a_failure_says_the_case_and_both_numbers() -> None:
    subject = Subject(name="flawed", loss=flawed("no_dual_clip", "gspo"))
    found = run_check(next(c for c in KINDS["grid"](0) if c.name.startswith("gspo: ")), subject).note
    assert re.fullmatch(
        r".*, dual clip, .*: (the loss|slope of row \d+, column \d+):"
        r" expected [-.e\d]+, got [-.e\d]+",
        found,
    )


@pytest.mark.parametrize("draw", range(5))
def test_a_drawn_step_holds_every_cell(draw: int) -> None:
    """Of ratio, weight and drift with both signs of the advantage, for tokens and for rows."""
    rows = rows_of(drawn_step(draw))
    assert all(4 <= len(row) <= 8 for row in rows)
    for means in (False, True):
        cells = set()
        for row in rows:
            taken = [row] if means else [[token] for token in row]
            for of in taken:
                sign = sum(t.advantage for t in of) > 0
                ratio = math.exp(sum(t.new - t.old for t in of) / len(of))
                weight = math.exp(sum(t.old - t.behaviour for t in of))
                drifted = sum(t.behaviour - t.new for t in of) / len(of) > DRIFT
                cells |= {(sign, "ratio", bisect([1 - LOW, 1 + HIGH, DUAL], ratio))}
                cells |= {(sign, "weight", bisect([FLOOR, CAP], weight)), (sign, "drift", drifted)}
        assert len(cells) == 2 * (4 + 3 + 2), cells
    assert any(t.reference < t.new for row in rows for t in row)
    assert any(t.reference > t.new for row in rows for t in row)


def test_what_is_not_offered_counts_neither_way() -> None:
    subject = Subject(name="grpo alone", loss=flawed_losses.grpo_alone)
    results = [run_check(check, subject) for check in KINDS["closed forms"]()]
    assert {r.status for r in results} == {Status.PASSED, Status.NOT_OFFERED}


def test_a_loss_that_raises_has_failed_in_its_own_words() -> None:
    subject = Subject(name="raises", loss=flawed_losses.raises)
    result = run_check(next(iter(KINDS["grid"]())), subject)
    assert result.status == Status.FAILED
    assert result.note.endswith("KeyError: 'epsilon'")


@pytest.mark.parametrize("actual", [[math.nan], [1.0 + 1e-6], [1.0, 1.0]])
def test_a_check_fails_on_nan_on_a_difference_and_on_another_shape(actual: list[float]) -> None:
    check = ConformanceCheck(criterion="AC-0", name="one", run=lambda _: ([1.0], actual))
    assert run_check(check, OURS).status == Status.FAILED


def test_names_of_checks_are_unique() -> None:
    names = [(kind, check.name) for kind, check in checks()]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_a_loss_of_ones_own_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss` is right in what it offers; `advantages` beside it gives a lone rollout its raw reward."""
    monkeypatch.syspath_prepend(HERE)
    done = CliRunner().invoke(
        cli, ["conformance", "--against", "flawed_losses", "--json"], standalone_mode=False
    )
    assert done.return_value == 1
    results = json.loads(done.stdout)["results"]
    assert [r["name"] for r in results if r["status"] == "failed"] == [
        "advantages of 5: mean, std none",
        *(f"groups of any size, missing rewards: {b}, std {s}" for b in ("mean", "rloo") for s in STD),
    ]
    assert {r["status"] for r in results} == {"passed", "failed", "not offered"}


def test_a_loss_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my loss.py"
    file.write_text("import beside_it\n\ndef mine(*_):\n    raise KeyError(beside_it.WORD)\n")
    (tmp_path / "beside_it.py").write_text("WORD = 'epsilon'\n")
    done = CliRunner().invoke(cli, ["conformance", "--against", f"{file}:mine"], standalone_mode=False)
    assert done.return_value == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    assert len(failed) > 200
    assert all(line.endswith("KeyError: 'epsilon'") for line in failed)


@pytest.mark.parametrize(
    ("against", "sentence"),
    [
        ("no_such_file.py", "no_such_file.py; give a file"),
        ("no_such_module", "no_such_module: cannot import no_such_module"),
        ("flawed_losses:nothing", "flawed_losses has no function 'nothing'"),
        (":loss", "names no module"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused(
    against: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    done = CliRunner().invoke(cli, ["conformance", "--against", against], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert sentence in str(done.exception)


def test_a_loss_that_offers_nothing_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_losses.py").write_text("def loss(*_):\n    raise NotImplementedError\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(cli, ["conformance", "--against", "no_losses"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert "nothing was checked" in str(done.exception)


def test_the_table_names_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    done = CliRunner().invoke(
        cli, ["conformance", "--against", "flawed_losses:raises"], standalone_mode=False
    )
    assert done.return_value == 1
    for kind in KINDS:
        assert kind in done.stdout
    assert "FAILED" in done.stdout
