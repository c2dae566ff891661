"""Tasks out of twenty packages of the registry: their source distributions are downloaded, then mined.

    python integration/mine_packages.py --out FOLDER [--workers 2] [--packages 3]

FOLDER/sdists keeps the archives, FOLDER/mined.jsonl the tasks, FOLDER/yield.json what each package gave;
their workspaces are in the log of NANO_HOME. What was downloaded is not downloaded again, and a mining that
was stopped goes on. Mining runs a package's code in jails alone. A package whose archive holds no tests is
named and left out. The exit code is 1 where fewer tasks came out than `--wanted`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from smoke import TOY, parse, toy_package

PACKAGES = [
    "boltons==26.2.0",
    "cachetools==8.0.1",
    "funcy==2.1",
    "lark==1.3.1",
    "marshmallow==4.4.0",
    "mistune==3.4.0",
    "more-itertools==11.2.1",
    "natsort==8.4.0",
    "netaddr==1.3.0",
    "schema==0.7.8",
    "portion==2.6.3",
    "pyasn1==0.6.5",
    "pydash==8.1.0",
    "pyrsistent==0.20.0",
    "semver==3.1.1",
    "textdistance==4.6.3",
    "tinydb==4.9.0",
    "toolz==1.0.0",
    "voluptuous==0.16.0",
    "wcwidth==0.9.4",
]
"""with fast tests in their archives, and not installed with nano, where an agent could read them"""


def with_tests(requirement: str, folder: Path) -> Path | None:
    from nano_mining.packages import read_package
    from nano_mining.releases import source_archive
    from nano_shared.errors import UsageError

    try:
        read_package(archive := source_archive(requirement, folder))
    except UsageError as problem:
        print(f"left out: {problem}", file=sys.stderr)
        return None
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--packages", type=int, default=len(PACKAGES), help="the first so many of the list")
    parser.add_argument("--wanted", type=int, default=5000)
    given = parse(parser, workers=1, packages=1, wanted=1)
    folder = given.out / "sdists"
    folder.mkdir(parents=True, exist_ok=True)
    if given.smoke:
        PACKAGES[:0] = [TOY]
        toy_package(folder)
    found = [with_tests(requirement, folder) for requirement in PACKAGES[: given.packages]]
    archives = [str(archive) for archive in found if archive is not None]
    print(f"{len(archives)} of {given.packages} packages have tests", file=sys.stderr)
    tasks, report = given.out / "mined.jsonl", given.out / "yield.json"
    command = [sys.executable, "-m", "nano_rl", "tasks", "mine", *archives]
    command += ["--out", str(tasks), "--report", str(report)]
    command += ["--workers", str(given.workers)] if given.workers else []
    done = subprocess.run(command, check=False).returncode
    if done not in (0, 130):  # 130: interrupted, with what was there by then
        return done
    count = len(tasks.read_text(encoding="utf-8").splitlines())
    print(f"{count} tasks of {len(archives)} packages")
    return int(count < given.wanted)


if __name__ == "__main__":
    sys.exit(main())
