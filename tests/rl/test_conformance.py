"""The published suite: our losses pass it, and each way in which a loss has been wrong fails it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import flawed_losses
import pytest
import torch
from click.testing import CliRunner

from nano_rl.commands.conformance import command
from nano_rl.conformance.adapter import OURS, Subject
from nano_rl.conformance.check import Check, Status, run_check
from nano_rl.conformance.suite import KINDS, checks, run_suite
from nano_shared.errors import UsageError

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def ours() -> dict[str, list[object]]:
    results: dict[str, list[object]] = {}
    for kind, result in run_suite(OURS):
        results.setdefault(kind, []).append(result)
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_our_losses_pass(kind: str, ours: dict[str, list[object]]) -> None:
    assert len(ours[kind]) >= 10
    assert [r for r in ours[kind] if r.status != Status.PASSED] == []  # type: ignore[attr-defined]


def failures(loss: Callable[..., torch.Tensor], *kinds: str) -> list[str]:
    subject = Subject(name="flawed", loss=loss, advantages=None)
    found = [run_check(check, subject) for kind in kinds for check in KINDS[kind]()]
    return [r.name for r in found if r.status == Status.FAILED]


@pytest.mark.parametrize(
    ("flaw", "kind", "found"),
    [
        ("mean_of_micro_batch", "invariances", "recipe: cut into micro-batches"),
        ("mask_forgotten", "invariances", "recipe: padding of any content"),
        ("weights_of_the_present", "closed forms", "weights, truncated"),
        ("rejected_by_sign", "closed forms", "a sequence is rejected whole"),
        ("gradient_through_the_weight", "closed forms", "cispo: no gradient through the ratio"),
        ("mean_over_rows", "invariances", "a trajectory in one row or in two"),
        ("k3_for_every_kl", "exact KL", "k2 in the loss"),
        ("k3_for_every_kl", "exact KL", "k1 in the reward, sequences"),
    ],
)
def test_a_flawed_loss_is_found(flaw: str, kind: str, found: str) -> None:
    assert found in failures(getattr(flawed_losses, flaw), kind)


def test_what_is_not_offered_counts_neither_way() -> None:
    subject = Subject(name="grpo alone", loss=flawed_losses.grpo_alone, advantages=None)
    results = [run_check(check, subject) for check in KINDS["closed forms"]()]
    assert {r.status for r in results} == {Status.PASSED, Status.NOT_OFFERED}


def test_a_loss_that_raises_has_failed_in_its_own_words() -> None:
    subject = Subject(name="raises", loss=flawed_losses.raises, advantages=None)
    result = run_check(next(iter(KINDS["derivatives"]())), subject)
    assert (result.status, result.note) == (Status.FAILED, "KeyError: 'epsilon'")


@pytest.mark.parametrize("actual", [[math.nan], [1.0 + 1e-6], [1.0, 1.0]])
def test_a_check_fails_on_nan_on_a_difference_and_on_another_shape(actual: list[float]) -> None:
    check = Check(criterion="AC-0", name="one", run=lambda _: ([1.0], actual))
    assert run_check(check, OURS).status == Status.FAILED


def test_names_of_checks_are_unique() -> None:
    names = [(kind, check.name) for kind, check in checks()]
    assert len(set(names)) == len(names)


def test_a_loss_of_ones_own_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`loss` is right in what it offers; `advantages` beside it gives a lone rollout its raw reward."""
    monkeypatch.syspath_prepend(HERE)
    done = CliRunner().invoke(command, ["--against", "flawed_losses", "--json"], standalone_mode=False)
    assert done.return_value == 1
    results = json.loads(done.stdout)["results"]
    assert [r["name"] for r in results if r["status"] == "failed"] == ["advantages of 5: mean, std none"]
    assert {r["status"] for r in results} == {"passed", "failed", "not offered"}


@pytest.mark.parametrize(
    ("against", "sentence"),
    [
        ("no_such_module", "'no_such_module' cannot be imported"),
        ("flawed_losses:nothing", "flawed_losses has no function 'nothing'"),
        (":loss", "cannot be imported"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused(
    against: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    done = CliRunner().invoke(command, ["--against", against], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert sentence in str(done.exception)


def test_a_loss_that_offers_nothing_has_not_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_losses.py").write_text("def loss(*_):\n    raise NotImplementedError\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(command, ["--against", "no_losses"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert "nothing was checked" in str(done.exception)


def test_the_table_names_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    done = CliRunner().invoke(command, ["--against", "flawed_losses:raises"], standalone_mode=False)
    assert done.return_value == 1
    for kind in KINDS:
        assert kind in done.stdout
    assert "FAILED" in done.stdout
