"""`nano-coder log verify`: which runs may train, and whether their tokens are those of their policy."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, Log, ToolOption, open_log
from nano_coder.tools.tool import TOOLS
from nano_coder.verify.trainable import RefusalCode, RunFinding, findings, imitation_refusal
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import NanoError, UsageError
from nano_shared.printable import printable
from nano_shared.run_facts import RunFacts, RunFilter
from nano_shared.store import LogStore

if TYPE_CHECKING:
    from nano_coder.verify.tokens import Certificate
    from nano_shared.policy import InterfaceProfile


def verify(
    runs: Annotated[list[str] | None, Argument(metavar="RUN")] = None,
    deep: Annotated[
        bool, Option("--deep", help="Recompute the log-probs under the policy that a run names.")
    ] = False,
    model: Annotated[
        str | None, Option(help="With --deep: where that policy lies, if not under the name that a run has.")
    ] = None,
    tools: ToolOption = None,
    directory: DirectoryOption = Path(),
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """May each RUN train a policy gradient, and if not, why? Without RUN: every run of the log, a line each.

    Exit code 0 if all may, 1 if not.

    With --deep: are their tokens and log-probs those of their policy? 0 all certified, 1 not all, 2 where
    the policy of one is not at hand and the others are certified.
    """
    if model is not None and not deep:
        raise UsageError("--model names the policy that recomputes log-probs; give --deep with it")
    runs = runs or []
    for tool in tools or []:
        TOOLS.give(tool)
    with open_log(log, directory) as store:
        checked: set[str] = set()
        looks = (_look(facts, store, deep, model, checked) for facts in _facts(store, runs))
        return _tell_one(next(looks), as_json) if len(runs) == 1 else _tell_all(looks, as_json)


def _tell_one(look: _Look, as_json: bool) -> int:
    if look.missing is not None:
        raise look.missing
    emit(look.as_dict(), as_json, lambda: print("\n".join(look.story())))
    return look.exit_code


def _tell_all(looks: Iterator[_Look], as_json: bool) -> int:
    counts: Counter[str] = Counter()
    codes = {0}
    for look in looks:
        emit(look.as_dict(), as_json, partial(print, f"{look.facts.id}  {look.line()}"))
        sys.stdout.flush()
        counts[look.standing] += 1
        codes.add(look.exit_code)
    if not as_json:
        print(f"{counts.total()} runs: {', '.join(f'{n} {name}' for name, n in counts.items()) or 'none'}")
    return 1 if 1 in codes else max(codes)


def _facts(store: LogStore, runs: Sequence[str]) -> Iterator[RunFacts]:
    """The columns, which can be judged where a run is too damaged to be loaded."""
    chosen = [RunFilter(runs=(store.resolve(run),)) for run in runs] or [RunFilter()]
    for one in chosen:
        with closing(store.facts(one)) as found:  # type: ignore[type-var]
            yield from found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    facts: RunFacts
    checks: list[RunFinding]
    certificate: Certificate | None
    """of --deep"""
    missing: UsageError | None
    """why --deep could not look: the policy is not at hand"""
    profile: InterfaceProfile | None
    """of the policy that would imitate it; None: one of the run's own profile"""
    no_lesson: RunFinding | None
    """why that policy may not imitate it"""

    @property
    def trainable(self) -> bool:
        return not any(check.blocks for check in self.checks)

    @property
    def standing(self) -> str:
        if self.missing is not None:
            return "whose policy is not at hand"
        if self.certificate is not None:
            return "certified" if self.certificate.certified else "not certified"
        return "may train" if self.trainable else "may not train"

    @property
    def exit_code(self) -> int:
        if self.missing is not None:
            return self.missing.exit_code
        sound = self.trainable if self.certificate is None else self.certificate.certified
        return 0 if sound else 1

    def line(self) -> str:
        if self.missing is not None:
            return printable(f"unknown: {self.missing}")
        if self.certificate is None:
            wrong = [check for check in self.checks if check.blocks]
        else:
            wrong = list(self.certificate.findings)
        gap = self.certificate.gap if self.certificate else None
        near = f", {gap.max:.2g} nats away at most" if gap and not wrong else ""
        return printable(self.standing + near + "".join(f"; {check.text}" for check in wrong))

    def story(self) -> Iterator[str]:
        yield f"run {self.facts.id} {'may' if self.trainable else 'may not'} train a policy gradient"
        for check in self.checks:
            yield f"  {'no: ' if check.blocks else 'ok: '}{printable(check.text)}"
        who = f"a policy of profile {self.profile.name if self.profile else self.facts.profile}"
        why = f"may not imitate it: {self.no_lesson.text}" if self.no_lesson else "may imitate it"
        yield f"  {who} {printable(why)}"
        certificate = self.certificate
        if certificate is None:
            return
        yield f"{self.standing} by {printable(certificate.policy)}"
        for check in certificate.findings:
            yield f"  no: {printable(check.text)}"
        if gap := certificate.gap:
            far = f"{gap.max:.2g} nats away at most, {gap.mean:.2g} in the mean"
            yield f"  {gap.tokens} log-probs recomputed in {certificate.dtype}: {far}"

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "run": self.facts.id, "trainable": self.trainable,
            "findings": [check.as_dict() for check in self.checks],
            "imitation": {
                "profile": self.profile.name if self.profile else self.facts.profile,
                "may": self.no_lesson is None, "refusal": self.no_lesson and self.no_lesson.as_dict(),
            },
        }  # fmt: skip
        if self.certificate is not None:
            fields["deep"] = self.certificate.as_dict()
        if self.missing is not None:
            fields["deep"] = {"certified": None, "reason": str(self.missing)}
        return fields


def _look(facts: RunFacts, store: LogStore, deep: bool, model: str | None, checked: set[str]) -> _Look:
    certificate = missing = None
    if deep:
        from nano_coder.verify.tokens import NotAtHand, deep_verify

        try:
            certificate = deep_verify(facts, store, model=model)
        except NotAtHand as problem:
            missing = problem
    checks = list(findings(facts))
    if damage := store.check_blobs(facts.id, checked):
        checks.append(RunFinding(True, RefusalCode.DAMAGED_BLOB.value, damage))
    profile = _learner()
    refusal = imitation_refusal(facts, profile, store.blobs)
    return _Look(
        facts=facts, checks=checks, certificate=certificate, missing=missing, profile=profile,
        no_lesson=refusal,
    )  # fmt: skip


@cache
def _learner() -> InterfaceProfile | None:
    """The profile of the model that `nano-rl sft` trains unless one is named; None where there is none."""
    from nano_coder.agent.profiles import find_profile
    from nano_coder.models.opening import usual_profile

    try:
        return find_profile(usual_profile(None))
    except NanoError:
        return None
