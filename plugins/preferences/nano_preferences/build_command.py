"""`nano-rl preferences build`: pairs out of the log: verdicts, what people said, a judge, principles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from nano_coder.commands.options import open_log
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_preferences.command import no_pair, say
from nano_preferences.composed import checked
from nano_preferences.log_pairs import ALONE, SOURCES, Groups, PairSource, RunScorer, log_pairs
from nano_preferences.registry import open_part
from nano_rl.command_setup import sandbox_opener
from nano_rl.commands.options import Log, Seed
from nano_rl.rewards.reward import Part
from nano_rl.tasks.task_file import refuse_unwritable
from nano_shared.errors import ConfigError, UsageError
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


def open_judge(name: str, settings: Mapping[str, str | None]) -> Part:
    """The part `judge` or `constitution`, ready. Raises UsageError where it cannot judge."""
    try:
        part = open_part(name, {key: value for key, value in settings.items() if value is not None})
        part.prepare()
    except ConfigError as problem:
        raise UsageError(f"--from {name}: {problem}") from None
    return part


def judged(
    name: str, part: Part, groups: Sequence[Sequence[Trajectory]], runtime: Runtime, refused: Counter[str]
) -> dict[str, float]:
    """Run -> what the part says of it, between 0 and 1; runs that it is silent on or failed at are counted.
    The runs of a group tried one task and are compared with each other."""
    worth: dict[str, float] = {}
    for runs in groups:
        if len(runs) < 2:
            refused[f"{name}: {ALONE}"] += len(runs)
            continue
        for run, score in zip(runs, part.score(runs, runtime), strict=True):
            value = checked(name, run, score).value
            if value is None:
                refused[f"{name}: {score.failure or 'nothing to say'}"] += 1
            else:
                worth[run.id] = value
    return worth


Prefers = StrEnum("Prefers", ["graded", "feedback", "edit", "judge", "constitution"])


def command(
    out: Annotated[Path, Option(help="JSON lines file to write.")],
    sources: Annotated[
        list[Prefers] | None,
        Option(
            "--from",
            help="Who prefers; repeatable. The first three without it: they stand in the log,"
            " the others are asked.",
        ),
    ] = None,
    judge_url: Annotated[
        str | None, Option(metavar="URL", help="Judge at an OpenAI-compatible endpoint, up to /v1.")
    ] = None,
    judge_model: Annotated[
        str | None, Option(metavar="NAME", help="Its model; without a URL, a checkpoint that is loaded here.")
    ] = None,
    principles: Annotated[
        str | None, Option(metavar="FILE", help="Constitution, if not the one that comes with nano.")
    ] = None,
    per_task: Annotated[
        int, Option(min=1, help="Most pairs of one task that verdicts, and as many that opinions, make.")
    ] = 4,
    seed: Seed = 0,
    log: Log = None,
) -> int:
    """Write the preference pairs that the log holds, with the exact tokens of the runs and who preferred."""
    from nano_preferences.pairs import write_pairs

    if out.exists():
        raise UsageError(f"{out} exists already; name another file with --out")
    refuse_unwritable(out)
    settings = _settings(sources or (), judge_url, judge_model, principles)
    with open_log(log) as store:
        scorers = {name: _judge(name, given, store) for name, given in settings.items()}
        chosen = [source for source in SOURCES if not sources or source in sources]
        found = log_pairs(store, sources=chosen, per_task=per_task, seed=seed, scorers=scorers)
    say(found.refused)
    if not found.pairs:
        raise UsageError(no_pair(found.refused))
    write_pairs(out, found.pairs)
    counts = Counter(pair.source for pair in found.pairs)
    print(f"{len(found.pairs)} pairs ({', '.join(f'{n} {s}' for s, n in counts.items())}) in {out}")
    return 0


def _settings(
    sources: Sequence[str], url: str | None, model: str | None, principles: str | None
) -> dict[PairSource, dict[str, str | None]]:
    """Part -> its settings, of those that are asked. Raises UsageError for a flag that nobody reads."""
    own: dict[PairSource, dict[str, str | None]] = {"judge": {}, "constitution": {"path": principles}}
    judged = {name: given | {"url": url, "model": model} for name, given in own.items() if name in sources}
    if (url or model) and not judged:
        raise UsageError(
            "--judge-url and --judge-model name a judge; add --from judge or --from constitution"
        )
    if principles and "constitution" not in judged:
        raise UsageError("--principles are read by --from constitution alone; add that, or leave them out")
    return judged


def _judge(name: str, settings: dict[str, str | None], store: LogStore) -> RunScorer:
    part = open_judge(name, settings)
    # runs are read and none is made
    runtime = Runtime(policy=ScriptedPolicy([]), sandbox=sandbox_opener()(), store=store)

    def ask(groups: Groups, refused: Counter[str]) -> Mapping[str, float]:
        return judged(name, part, groups, runtime, refused)

    return ask
