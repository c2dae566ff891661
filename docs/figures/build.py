"""Draw the pictures and fill the tables of the documents from docs/results/*.json.

    python docs/figures/build.py            writes docs/figures/*.svg, docs/commands.md, and tables
    python docs/figures/build.py --check    writes nothing; names what is stale, and ends with 1

A table stands between `<!-- table: NAME -->` and `<!-- end -->` in README.md or a document; NAME is a key of
`tables.TABLES`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from circle import circle
from commands import commands_page
from curve import loop, repair
from scale import engines, staleness
from tables import TABLES

ROOT = Path(__file__).parents[2]
RESULTS, FIGURES = ROOT / "docs" / "results", ROOT / "docs" / "figures"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def made() -> Iterator[tuple[Path, str]]:
    """Every file that holds something made from results, and what it ought to hold."""
    yield FIGURES / "circle.svg", circle()
    yield FIGURES / "loop.svg", loop(result("flywheel"))
    yield FIGURES / "repair.svg", repair(result("repair"))
    yield FIGURES / "staleness.svg", staleness(result("staleness"))
    yield FIGURES / "engines.svg", engines(result("scale_simulation"))
    yield ROOT / "docs" / "commands.md", commands_page()
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if MARKED.search(text):
            yield page, MARKED.sub(filled, text)


def filled(match: re.Match[str]) -> str:
    names, write = TABLES[match[2]]
    return f"{match[1]}{write(*map(result, names.split()))}\n{match[3]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures and tables of the documents, from docs/results.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where something is stale")
    check = parser.parse_args().check
    stale = [(path, text) for path, text in made() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in stale:
        print(("stale: " if check else "wrote ") + str(path.relative_to(ROOT)))
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
