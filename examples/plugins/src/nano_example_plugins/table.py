"""A sink: where the metrics of a training go beside metrics.jsonl."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Table:
    """Appends the step and its mean reward to NAME.tsv in the working directory."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = Path(f"{name}.tsv")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            print(step, metrics.get("reward_mean", ""), sep="\t", file=file)

    def close(self) -> None:
        """Nothing is left open."""
