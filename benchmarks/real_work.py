"""What nano adds to the time of the tools on real packages, of which an agent mends one bug each.

    python benchmarks/real_work.py [--packages boltons more-itertools] [--seconds 90] [--plain] [--out FILE]

The packages' source distributions come from the registry by pip. A bug is planted in a copy of each; a
scripted model runs one test file, looks at the code, mends it, writes a file of 300 lines in one call (a test
that takes `--seconds`), runs the whole suite, and submits. The commands tell how long they took (`tools`);
what `nano-coder run` took beyond them, start and snapshots included, is what nano adds. With `--plain` the
same commands run in a plain directory before. Fails if nano adds a tenth or more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_mining.releases import source_folder
from nano_shared.store import LogStore

ENVIRONMENT = "REAL_WORK_SCRIPT"
"""file with the texts that the scripted model says"""
PYTEST = "python -m pytest -q -p no:cacheprovider"
NANO = [sys.executable, "-c", "from nano_coder.cli import main; main()"]
MOST = 0.1


@dataclass(frozen=True)
class Bug:
    package: str
    path: str
    right: str
    wrong: str
    test: str


BUGS = {
    "boltons": Bug(
        "boltons", "boltons/iterutils.py", "        cur_chunk = list(itertools.islice(src_iter, size))",
        "        cur_chunk = list(itertools.islice(src_iter, size + 1))", "tests/test_iterutils.py",
    ),
    "more-itertools": Bug(
        "more-itertools", "more_itertools/recipes.py", "    return list(islice(iterable, n))",
        "    return list(islice(iterable, n + 1))", "tests/test_recipes.py",
    ),
}  # fmt: skip


def policy(name: str, options: Any) -> Any:
    """The scripted model, as `--model FILE.py:policy` opens it."""
    from nano_coder.models.scripted import ScriptedPolicy

    scripted = ScriptedPolicy(json.loads(Path(os.environ[ENVIRONMENT]).read_text()))
    scripted.profile = "api-1"  # type: ignore[attr-defined]
    return scripted


def long_test(seconds: int) -> str:
    """A test file of 300 lines that takes so many seconds."""
    head = [
        "import time", "", "import pytest", "", "", f'@pytest.mark.parametrize("part", range({seconds}))',
        "def test_that_takes_its_time(part):", "    time.sleep(1)", "", "",
    ]  # fmt: skip
    return "\n".join([*head, *(f"VALUE_{number} = {number}" for number in range(300 - len(head)))]) + "\n"


def script(bug: Bug, seconds: int) -> tuple[list[str], list[str]]:
    """What the model says, and the shell lines in it."""
    lines = [f"{PYTEST} {bug.test}", f"grep -n '{bug.wrong.strip()}' {bug.path}", f"{PYTEST}"]
    lines = [
        f"began=$(date +%s.%N); {line}; code=$?; echo took $began $(date +%s.%N); exit $code"
        for line in lines
    ]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("shell", {"command": lines[0]}),
        ("shell", {"command": lines[1]}),
        ("edit_file", {"path": bug.path, "old": bug.wrong, "new": bug.right}),
        ("write_file", {"path": "tests/test_long.py", "content": long_test(seconds)}),
        ("shell", {"command": lines[2]}),
        ("submit", {}),
    ]
    says = [f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls]
    return says, lines


def plain_seconds(project: Path, bug: Bug, lines: Sequence[str], seconds: int) -> float:
    """The time of the commands in a plain copy of the project."""
    copy = project.with_name("plain")
    shutil.copytree(project, copy)
    taken = 0.0
    for number, line in enumerate(lines):
        if number == 2:
            (copy / bug.path).write_text((copy / bug.path).read_text().replace(bug.wrong, bug.right))
            (copy / "tests/test_long.py").write_text(long_test(seconds))
        started = time.perf_counter()
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        subprocess.run(line, shell=True, cwd=copy, capture_output=True, env=environment)
        taken += time.perf_counter() - started
    return taken


def measure(bug: Bug, seconds: int, *, plain: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = source_folder(bug.package, folder)
        source = (project / bug.path).read_text()
        if source.count(bug.right) != 1:
            raise SystemExit(f"{bug.path} of this {bug.package} is another one: plant another bug")
        (project / bug.path).write_text(source.replace(bug.right, bug.wrong))
        says, lines = script(bug, seconds)
        (folder / "script.json").write_text(json.dumps(says))
        before = plain_seconds(project, bug, lines, seconds) if plain else None
        environment = {
            **os.environ,
            "NANO_HOME": str(folder / "home"),
            ENVIRONMENT: str(folder / "script.json"),
        }
        started = time.perf_counter()
        done = subprocess.run(
            [*NANO, "run", "The tests fail. Mend it.", "-C", str(project), "--json",
             "--model", f"{Path(__file__).resolve()}:policy"],
            env=environment, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        total = time.perf_counter() - started
        told = json.loads(done.stdout)
        turns = LogStore.open(str(folder / "home/log.db")).get(told["run"]).turns
        seen = [observation for turn in turns for observation in turn.observations]
        took = [re.findall(r"took ([\d.]+) ([\d.]+)", observation.text) for observation in seen]
        tools = sum(float(end) - float(began) for times in took for began, end in times)
        return {
            "package": project.name,
            "solved": seen[0].exit_code == 1 and seen[-2].exit_code == 0,
            "tests": re.findall(r"\d+ passed", seen[-2].text),
            "nano": round(total, 2),
            "tools": round(tools, 2),
            "added": round(total / tools - 1, 4),
            "in_calls": round(sum(o.ended - o.started for o in seen), 2),
            **({"plain": round(before, 2)} if before else {}),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", nargs="+", default=list(BUGS), choices=list(BUGS))
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    for package in given.packages:
        found.append(measure(BUGS[package], given.seconds, plain=given.plain))
        print(json.dumps(found[-1]), flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["solved"] and row["added"] < MOST for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
