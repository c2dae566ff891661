"""What `dpo` and `reward-model` share: where their pairs come from, and what is said of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from nano_coder.commands.options import open_log
from nano_shared.errors import UsageError

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights
    from nano_rl.preferences.pairs import PairRows, PairTask

Pairs = Annotated[Path | None, Option(help="JSON lines file of preference pairs.")]
FromLogs = Annotated[
    bool, Option("--from-logs", help="Pairs from the log, as `preferences build` makes them.")
]


def open_pairs(
    opened: OpenedWeights, pairs_file: Path | None, from_logs: bool, log: str | None, *, seed: int
) -> list[PairRows]:
    """The pairs as one policy reads them; says on stderr what was refused and what had to be encoded.

    Raises UsageError for a bad row, a pair of another policy's tokens, and where there is no pair.
    """
    from nano_rl.imitation.demonstrations import reader_of
    from nano_rl.preferences.log_pairs import log_pairs
    from nano_rl.preferences.pairs import pair_rows, read_pairs

    if from_logs == (pairs_file is not None):
        raise UsageError("give either --pairs FILE, or --from-logs")
    if pairs_file is not None:
        pairs = read_pairs(pairs_file)
    else:
        found = log_pairs(open_log(log), seed=seed)
        say(found.refused)
        if not found.pairs:
            raise UsageError(no_pair(found.refused))
        pairs = list(found.pairs)
    vocabulary = int(opened.loaded.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    rows = pair_rows(pairs, reader_of(opened), vocabulary=vocabulary)
    encoded = sum(row.encoded for row in rows)
    exact = f"{len(rows) - encoded} with the tokens that were logged"
    print(f"pairs: {len(rows)}, {exact}, {encoded} text-only, encoded here by the template", file=sys.stderr)
    return rows


def say(refused: Counter[str]) -> None:
    """What made no pair, a line a reason, on stderr."""
    for reason, count in refused.most_common():
        print(f"left out: {count} ({reason})", file=sys.stderr)


def no_pair(refused: Counter[str]) -> str:
    """Why a log made none, and what would help."""
    for reason, _ in refused.most_common():
        for symptom, advice in _JUDGES.items():
            if symptom in reason:
                return f"the log holds no preference pair: {advice}"
    return (
        "the log holds no preference pair: it needs a success and a failure of one task, or feedback;"
        " nano-rl rollout --group-size 4 adds runs"
    )


_JUDGES = {
    "judge_unparseable": "the judge's answers name no winner; a larger model would",
    "judge_injectable": "the judge prefers wrong work that tells it to; name a better one",
    "judge_": "the judge did not answer (see above); check --judge-url and --judge-model",
}
"""what a failure of the judge asks for, the particular ones first"""


def trained_tasks(pairs: Iterable[PairRows]) -> list[PairTask]:
    return [pair.task for pair in pairs if pair.task is not None]


def trained_runs(pairs: Iterable[PairRows]) -> list[str]:
    return sorted({run for pair in pairs for run in pair.run_ids})
