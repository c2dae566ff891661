"""`nano-coder log`: list, show, verify, path; the plug-in logs has the others."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from nano_coder.commands.display import Display
from nano_coder.commands.options import DirectoryOption, Log, RunArgument, ToolOption, Verbose, open_log
from nano_coder.tools.tool import TOOLS
from nano_coder.verify.trainable import RefusalCode, RunFinding, findings, imitation_refusal
from nano_shared.command_line import Console, JsonOption, emit, lazy_app
from nano_shared.errors import NanoError, UsageError
from nano_shared.printable import printable
from nano_shared.run_facts import RunFacts, RunFilter
from nano_shared.store import LogStore, RunSummary

if TYPE_CHECKING:
    from nano_coder.verify.deep import Certificate
    from nano_shared.policy import InterfaceProfile


command = lazy_app(
    "nano-coder.log",
    {
        "list": (f"{__name__}:list_runs", "Your newest runs, a line each."),
        "show": (f"{__name__}:show", "One run whole: the task, each step, the diff, the verdict."),
        "verify": (f"{__name__}:verify", "May runs train a policy gradient, and if not, why?"),
        "export": ("+logs", "Write runs in another format."),
        "import": ("+logs", "Add the runs of files to the log."),
        "migrate": ("+cluster", "Copy a log into another, as to Postgres."),
        "redact": ("+logs", "Take the secrets out of runs for good."),
        "delete": ("+logs", "Delete runs, and files that only they need."),
        "prune": ("+logs", "Delete your old runs."),
        "stats": ("+logs", "What became of your runs, and what they cost."),
        "path": (f"{__name__}:path", "Where the log is."),
    },
    help="Look at the log of runs, and move runs in and out of it.",
)
_WIDTHS = {
    "run": 16, "started": 16, "policy": 10, "task": 16, "turns": 5, "tokens": 6, "stop": 13, "reward": 6,
    "owner": 20,
}  # fmt: skip
"""characters that a column needs to be of use"""
_LEFT_OUT = ("policy", "tokens", "started", "turns", "task", "stop")
"""on a terminal that is too narrow for all, in this order"""
_PIPED = 200


def list_runs(
    limit: Annotated[int, Option("-n", min=1, help="Newest runs shown.")] = 20,
    by: Annotated[str | None, Option(metavar="OWNER|all", help="Whose, if not yours.")] = None,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Your newest runs, a line each; those of others, too, that their owners share, with --by all."""
    runs = open_log(log).runs(limit, by)
    emit(runs, as_json, lambda: _show_list(runs, owners=by is not None))
    return 0


def _show_list(runs: Sequence[RunSummary], *, owners: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED)
    table = Table(box=None)
    columns = _columns(console.width, owners)
    needed = sum(_WIDTHS[name] + 2 for name in columns)
    spare, console.width = console.width - needed, max(console.width, needed)
    for name in columns:
        # rich would shrink them all alike
        more = max(0, min(spare, 48) // 2) if name in ("policy", "task") else 0
        table.add_column(name, no_wrap=True, width=_WIDTHS[name] + more)
    for run in runs:
        cells = {
            "run": run.id,
            "started": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
            "policy": printable(run.policy),
            "task": " ".join(printable(run.prompt).split())[:40],
            "turns": str(run.turns),
            "tokens": str(run.sampled_tokens),
            "stop": run.stop or "unfinished",
            "reward": "" if run.reward is None else f"{run.reward:g}",
            "owner": printable(run.owner or ""),
        }
        table.add_row(*(cells[name] for name in columns))
    console.print(table)


def _columns(width: int, owners: bool) -> list[str]:
    """The columns that fit; the run, its reward and owner stay at any width."""
    columns = [name for name in _WIDTHS if owners or name != "owner"]
    for name in _LEFT_OUT:
        if sum(_WIDTHS[column] + 2 for column in columns) <= width:
            break
        columns.remove(name)
    return columns


def show(
    run: RunArgument,
    directory: DirectoryOption = Path(),
    verbose: Verbose = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """One run whole: the task, each step, the diff, the verdict."""
    store = open_log(log, directory)
    trajectory = store.get(run)

    def tell() -> None:
        display = Display(quiet=False, verbose=verbose, answer=True)
        display.whole(trajectory)
        runs = tuple(store.side_by_side(trajectory.id))
        group = list(store.facts(RunFilter(runs=runs)))
        tries = [one for one in group if one.parent not in runs]
        if len(tries) > 1:
            passed = [one.id for one in tries if one.reward is not None and one.reward >= 1]
            print(f"one of {len(tries)} tries; passed: {', '.join(passed) or 'none'}")
        for one in group:
            if one not in tries:
                display.escalated(store.get(one.id))

    emit(trajectory, as_json, tell)
    return 0


def path(log: Log = None) -> int:
    """Where the log is."""
    print(open_log(log, create=True).url)
    return 0


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
            yield (
                f"  {gap.tokens} log-probs recomputed in {certificate.dtype}: {gap.max:.2g} nats away at"
                f" most, {gap.mean:.2g} in the mean"
            )

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "run": self.facts.id,
            "trainable": self.trainable,
            "findings": [check.as_dict() for check in self.checks],
            "imitation": {
                "profile": self.profile.name if self.profile else self.facts.profile,
                "may": self.no_lesson is None,
                "refusal": self.no_lesson.as_dict() if self.no_lesson else None,
            },
        }
        if self.certificate is not None:
            fields["deep"] = self.certificate.as_dict()
        if self.missing is not None:
            fields["deep"] = {"certified": None, "reason": str(self.missing)}
        return fields


def _look(facts: RunFacts, store: LogStore, deep: bool, model: str | None, checked: set[str]) -> _Look:
    certificate = missing = None
    if deep:
        from nano_coder.verify.deep import NotAtHand, deep_verify

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
