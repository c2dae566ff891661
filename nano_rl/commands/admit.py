"""`nano-rl admit`: what the log can teach, before a step is spent on it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from nano_rl.commands.options import log_option, seed_option
from nano_shared.errors import NanoError
from nano_shared.fact_rows import RunFilter
from nano_shared.store import LogStore

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights
import re
from datetime import datetime

from nano_shared.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_when(text: str, *, now: float, option: str = "--since") -> float:
    """Unix seconds of a date (2026-11-21), a time (2026-11-21T09:30, in local time unless it says), unix
    seconds, or so long ago: 90m, 12h, 7d, 2w.

    Raises UsageError for anything else.
    """
    ago = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if ago:
        return now - int(ago[1]) * _SECONDS[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text.strip()):
        return float(text)
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option} {text!r} is no time; write a date (2026-11-21), a time (2026-11-21T09:30), or so long"
            " ago (90m, 12h, 7d, 2w)"
        ) from None


@click.command("admit")
@log_option
@click.option("--task", metavar="PATTERN", help="Runs of tasks whose key matches, as in 'sum-*'.")
@click.option("--since", metavar="WHEN", help="Runs begun since a date, a time, or 90m, 12h, 7d, 2w ago.")
@click.option("--policy", metavar="NAME", help="Runs of a policy, by its name or the id of its weights.")
@click.option(
    "--model", help="Policy to be trained: checkpoint, folder or hub id. Default: the promoted one."
)
@click.option(
    "--max-staleness", type=click.IntRange(0), metavar="N", help="Refuse runs of a policy N steps older."
)
@click.option("--fresh", type=click.IntRange(1), metavar="G", help="What fresh rollouts up to G would add.")
@click.option("--exact", is_flag=True, help="Look at the tokens of every run, not of a sample.")
@seed_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    log: str | None, task: str | None, since: str | None, policy: str | None, model: str | None,
    max_staleness: int | None, fresh: int | None, exact: bool, seed: int, as_json: bool,
) -> int:  # fmt: skip
    """What the log can teach: runs by their best use, and each reason why not a better one.

    Everything is read off the columns of the log, and of a seeded sample of runs (or with --exact of all)
    the tokens are held against texts, template and weights. Without a model at hand the report says so.
    """
    began = None if since is None else parse_when(since, now=time.time())
    chosen = RunFilter(task=task, since=began, policy=policy)
    with LogStore.open(log, create=False) as store:
        from nano_rl.logs.admission import TargetPolicy as Bench
        from nano_rl.logs.survey import LogSurvey as Survey

        opened, note = _opened(model)
        look, bench = None, Bench(max_staleness=max_staleness)
        if opened is not None:
            from nano_rl.logs.admission import RunVerifier as SecondLook

            look = SecondLook(opened, store)
            bench = Bench(
                profile=opened.profile, template_hash=look.template_hash, version=opened.version,
                max_staleness=max_staleness,
            )  # fmt: skip
        report = Survey(
            store=store, chosen=chosen, target=bench, verifier=look, fresh=fresh, exact=exact, seed=seed
        ).report()
        report.notes += _notes(note, exact=exact, bounded=max_staleness is not None)
        if not report.runs:
            report.notes.append("no run of the log matches; leave out --task, --since or --policy")
        if as_json:
            print(json.dumps({"log": store.url, "policy": _named(opened), **report.as_dict()}))
        else:
            click.echo("\n".join((f"log {store.url}", *report.lines())))
    return 0


def _opened(model: str | None) -> tuple[OpenedWeights | None, str | None]:
    """The policy to judge for, or why there is none. Raises UsageError for one that was named and is not."""
    from nano_coder.models.opening import default_model, open_weights

    if model is not None:
        return open_weights(model), None
    try:
        return open_weights(default_model()), None
    except NanoError as problem:
        return None, str(problem)
    except ModuleNotFoundError as problem:
        return None, f"{problem}; install nano with its extra `rl`"


def _notes(problem: str | None, *, exact: bool, bounded: bool) -> list[str]:
    if problem is None:
        return []
    left = ["template and profile against the policy's", "tokens", "effective sample size"]
    left += ["--max-staleness"] if bounded else []
    left += ["--exact"] if exact else []
    return [f"no model is at hand ({problem}), so these were not judged: {', '.join(left)}"]


def _named(opened: OpenedWeights | None) -> dict[str, object] | None:
    if opened is None:
        return None
    return {"id": opened.loaded.id, "version": opened.version, "profile": opened.profile.name}
