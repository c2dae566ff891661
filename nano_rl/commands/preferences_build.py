"""`nano-rl preferences build`: pairs out of the log, by verdicts and by what people said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from nano_rl.commands.options import log_option
from nano_shared.errors import UsageError


@click.command("build")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSON lines file to write.")
@click.option(
    "--from",
    "sources",
    type=click.Choice(["graded", "feedback"]),
    multiple=True,
    help="Who prefers: verdicts, or people's feedback. May be given twice; both without it.",
)
@click.option(
    "--per-task",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Most pairs of one task that verdicts, and as many that opinions, may make.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of which runs are paired.")
@log_option
def command(out: Path, sources: tuple[str, ...], per_task: int, seed: int, log: str | None) -> int:
    """Write the preference pairs that the log holds, with the exact tokens of the runs."""
    from nano_rl.commands.pairs import say
    from nano_rl.log_pairs import SOURCES, log_pairs
    from nano_rl.preference_pairs import write_pairs
    from nano_shared.store import LogStore

    if out.exists():
        raise UsageError(f"{out} exists already; name another file with --out")
    chosen = [source for source in SOURCES if not sources or source in sources]
    with LogStore.open(log, create=False) as store:
        found = log_pairs(store, sources=chosen, per_task=per_task, seed=seed)
    say(found.refused)
    if not found.pairs:
        raise UsageError(
            "the log holds no preference pair: it needs a success and a failure of one task, or feedback"
        )
    write_pairs(out, found.pairs)
    counts = Counter(pair.source for pair in found.pairs)
    print(f"{len(found.pairs)} pairs ({', '.join(f'{n} {s}' for s, n in counts.items())}) in {out}")
    return 0
