"""Size and shape of the library: what a reader has to go through, counted.

    python benchmarks/house.py              prints every figure, its value before the rebuild, and its bar
    python benchmarks/house.py --write      also writes docs/results/house.json, from which `make docs` fills
                                            the table of CONTRIBUTING.md, and which tests/test_house.py holds
                                            the library to
    python benchmarks/house.py --entered    names the files that each journey enters

The files of a journey are those of the core and of plug-ins in which a function is called while a whole
command runs: a profile function sees every call in its process, of every thread. Code that runs only at
import, in a jail or in a child process is not counted. The model is tiny and has learned nothing; a reward of
the benchmark's own gives the one step of the training a gradient.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = {name: ROOT / name for name in ("nano_coder", "nano_rl")} | {
    "nano_shared": ROOT / "shared" / "nano_shared"
}
RESULT = ROOT / "docs" / "results" / "house.json"
BEFORE_AND_BAR = {
    "lines of the core": ("91,349", "≤ 50,000"),
    "modules of the core": ("517", "≤ 320"),
    "lines of core and plug-ins": ("91,349", "≤ 80,000"),
    "files from a task to a gradient (`nano-rl train --tasks`)": ("131", "≤ 70"),
    "files from a sentence to a diff (`nano-coder run --check`)": ("69", "≤ 40"),
    "files from a request to a logged run (`nano-coder serve`)": ("35", "≤ 24"),
    "files from a logged run to an admitted row (`nano-rl admit`)": ("50", "≤ 28"),
    "frames of ours at `policy_loss`": ("25", "≤ 14"),
    "most fields of a dataclass": ("23", "≤ 10"),
    "most parameters of a function": ("13", "≤ 7"),
    "contracts of imports broken (`lint-imports`)": ("0", "0"),
    "settings of a training": ("86", "≤ 40"),
    "options of the core's commands": ("250", "≤ 150"),
    "words of README": ("2,480", "≤ 900"),
    "words of docs": ("49,000", "≤ 18,000"),
    "class and alias names defined twice": ("3", "0"),
    "function length, 90th percentile": ("20", "≤ 22"),
    "test lines ÷ library lines": ("0.59", "≥ 0.65"),
}
"""figure -> its value before the rebuild, as the issue that asked for it counted, and its bar"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Size and shape of the library, counted.")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--entered", action="store_true", help="name the files of each journey")
    options = parser.parse_args()
    figures = {**quick(), **contracts(), **journeys(show=options.entered)}
    rows = [
        {"figure": figure, "before": before, "now": figures[figure], "bar": bar}
        for figure, (before, bar) in BEFORE_AND_BAR.items()
    ]
    for row in rows:
        print(f"{row['figure']:62} {row['before']:>8} {row['now']:>8} {row['bar']:>9}")
    if options.write:
        packages = [
            {"package": name, "modules": len(files), "lines": sum(map(lines, files))}
            for name, files in {**library(), **plugins(), "tests": tests()}.items()
        ]
        found = {"command": "python benchmarks/house.py --write", "rows": rows, "packages": packages}
        RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def quick() -> dict[str, str]:
    """The figures that are counted without running anything."""
    return {**sizes(), **names(), **functions(), **options_shown(), **settings(), **words()}


def library() -> dict[str, list[Path]]:
    """The core."""
    return {package: sorted(folder.rglob("*.py")) for package, folder in PACKAGES.items()}


def plugins() -> dict[str, list[Path]]:
    return {
        f"plugins/{folder.parent.name}": sorted(folder.rglob("*.py"))
        for folder in sorted((ROOT / "plugins").glob("*/nano_*"))
    }


def tests() -> list[Path]:
    return sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").glob("*/tests/**/*.py")])


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def sizes() -> dict[str, str]:
    modules = [path for files in library().values() for path in files]
    core = sum(map(lines, modules))
    whole = core + sum(lines(path) for files in plugins().values() for path in files)
    return {
        "lines of the core": f"{core:,}",
        "modules of the core": str(len(modules)),
        "lines of core and plug-ins": f"{whole:,}",
        "test lines ÷ library lines": f"{sum(map(lines, tests())) / whole:.2f}",
    }


def words() -> dict[str, str]:
    """Words of the pages written by hand, tables included: docs/commands.md is made from the programs."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "plugins").glob("*/README.md")]
    pages.remove(ROOT / "docs" / "commands.md")
    return {
        "words of README": f"{len((ROOT / 'README.md').read_text(encoding='utf-8').split()):,}",
        "words of docs": f"{sum(len(page.read_text(encoding='utf-8').split()) for page in pages):,}",
    }


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for files in library().values():
        for path in files:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def names() -> dict[str, str]:
    """Classes and aliases (`Name = ...` at the top of a module, in camel case) that share a name."""
    where: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                where[node.name].add(path)
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            if (
                isinstance(target, ast.Name)
                and target.id.lstrip("_")[:1].isupper()
                and not target.id.isupper()
            ):
                where[target.id].add(path)
    return {"class and alias names defined twice": str(sum(len(paths) > 1 for paths in where.values()))}


def functions() -> dict[str, str]:
    """Parameters of commands are options of the command line, and counted there."""
    lengths, most_parameters, most_fields = [], 0, 0
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if "commands" not in path.parts:
                    count = sum(argument.arg not in ("self", "cls") for argument in given)
                    most_parameters = max(most_parameters, count)
            decorators = "".join(map(ast.unparse, getattr(node, "decorator_list", ())))
            if isinstance(node, ast.ClassDef) and "dataclass" in decorators:
                most_fields = max(most_fields, sum(isinstance(line, ast.AnnAssign) for line in node.body))
    return {
        "function length, 90th percentile": str(sorted(lengths)[len(lengths) * 9 // 10]),
        "most parameters of a function": str(most_parameters),
        "most fields of a dataclass": str(most_fields),
    }


def contracts() -> dict[str, str]:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    counts = [line for line in done.stdout.splitlines() if line.startswith("Contracts:")]
    return {
        "contracts of imports broken (`lint-imports`)": counts[0].split(", ")[1].split()[0] if counts else "?"
    }


def options_shown() -> dict[str, str]:
    """Options of every command of the core, and each of the common ones once; --help and --version are not
    counted."""
    from nano_shared.command_line import COMMON_PANEL

    own, common = 0, set[str]()

    def walk(command: Any) -> None:
        nonlocal own
        if hasattr(command, "load"):
            for name, target in command.targets.items():
                if not target.startswith("+"):  # of a plug-in
                    walk(command.load(name))
            return
        for param in command.params:
            if param.param_type_name == "option" and not param.hidden and "--help" not in param.opts:
                if param.rich_help_panel == COMMON_PANEL:
                    common.update(param.opts[:1])
                else:
                    own += 1

    for module in ("nano_coder.cli", "nano_rl.cli"):
        walk(importlib.import_module("typer.main").get_command(importlib.import_module(module).cli))
    return {"options of the core's commands": str(own + len(common))}


def settings() -> dict[str, str]:
    from pydantic import BaseModel

    from nano_rl.config import TrainConfig

    def leaves(model: type[BaseModel]) -> int:
        kinds = [field.annotation for field in model.model_fields.values()]
        nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        return len(kinds) - len(nested) + sum(map(leaves, nested))

    return {"settings of a training": str(leaves(TrainConfig))}


SEEN = """
import json, os, sys, threading
folders, result = tuple(json.loads(os.environ["HOUSE_FOLDERS"])), os.environ["HOUSE_RESULT"]
files, frames = set(), 0

def see(frame, event, _argument):
    global frames
    code = frame.f_code
    wanted = code.co_filename not in files or code.co_name == "policy_loss"
    if event == "call" and wanted and code.co_filename.startswith(folders):
        above, names = frame, []
        while above is not None:
            if above.f_code.co_filename.startswith(folders):
                names.append(above.f_code.co_name)
            above = above.f_back
        if "<module>" in names:  # what an import runs
            return
        files.add(code.co_filename)
        if code.co_name == "policy_loss":
            frames = max(frames, len(names))

program, *sys.argv[1:] = sys.argv[1:]
threading.setprofile(see)
sys.setprofile(see)
try:
    __import__(program, fromlist=["main"]).main()
finally:
    sys.setprofile(None)
    threading.setprofile(None)
    with open(result, "w") as file:
        json.dump([sorted(files), frames], file)
"""
MODEL = r"""
from nano_coder.models.scripted import ScriptedPolicy

def open_script(name, options):
    return ScriptedPolicy(["@edit_file path=add.py line=2\n    return a + b", "@submit\ndone"])
"""
REWARD = """
def in_turn(prompts, completions, **_):
    return [float(number % 2) for number in range(len(completions))]
"""


def journeys(*, show: bool) -> dict[str, str]:
    """The files that each journey enters, and the depth of the loss."""
    with tempfile.TemporaryDirectory() as name:
        found = Journeys(Path(name)).all()
    if show:
        for journey, (files, _) in found.items():
            print(f"{journey}: {len(files)}", *files, sep="\n    ")
    counts = {figure: str(len(files)) for figure, (files, _) in found.items()}
    return counts | {"frames of ours at `policy_loss`": str(max(frames for _, frames in found.values()))}


class Journeys:
    """Runs the four commands in a folder."""

    def __init__(self, folder: Path) -> None:
        from integration.tiny_model import build_tiny

        self.folder, self.result = folder, folder / "seen.json"
        packages = [*PACKAGES.values(), *(ROOT / "plugins").glob("*/nano_*")]
        self.environment = os.environ | {
            "HOUSE_FOLDERS": json.dumps([f"{package}/" for package in packages]),
            "HOUSE_RESULT": str(self.result), "NANO_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))[:4]]
        build_tiny(folder / "tiny", texts, hidden=64, layers=2, max_positions=2048, vocab_size=600)
        (folder / "script.py").write_text(MODEL)
        (folder / "reward.py").write_text(REWARD)
        project = folder / "project"
        project.mkdir()
        (project / "add.py").write_text("def add(a, b):\n    return a - b\n")
        hidden = {"kind": "answer", "answer": 1}
        tasks = [{"key": f"t{n}", "prompt": "Say 1.", "hidden": hidden} for n in range(2)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    def all(self) -> dict[str, tuple[list[str], int]]:
        check = "python -c 'from add import add; assert add(1, 2) == 3'"
        log, model = ("--log", "log.db"), ("--model", "tiny")
        train = (
            "train", "--tasks", "tasks.jsonl", *model, "--name", "one", "--steps", "1", "--prompts", "2",
            "--group-size", "4", "--reward", "./reward.py:in_turn=1", "--limit", "max_turns=1",
            "--limit", "max_completion_tokens=8", *log,
        )  # fmt: skip
        script = ("--model", "./script.py:open_script", *log)
        run = ("run", "Mend add.py", "-C", "project", "--check", check, "--profile", "compact-1", *script)
        commands = (("nano_rl", *train), ("nano_coder", *run), None, ("nano_rl", "admit", *model, *log))
        figures = [name for name in BEFORE_AND_BAR if name.startswith("files")]
        return {
            figure: self._seen(*command) if command else self._served()
            for figure, command in zip(figures, commands, strict=True)
        }

    def _seen(self, program: str, *command: str) -> tuple[list[str], int]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", SEEN, f"{program}.cli", *command],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        return self._read()

    def _read(self) -> tuple[list[str], int]:
        files, frames = json.loads(self.result.read_text())
        return [str(Path(file).relative_to(ROOT)) for file in files], frames

    def _served(self) -> tuple[list[str], int]:
        command = ("serve", "--model", "tiny", "--port", "0", "--log", "served.db")
        with subprocess.Popen(
            [sys.executable, "-P", "-c", SEEN, "nano_coder.cli", *command],
            cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        ) as server:  # fmt: skip
            assert server.stdout is not None
            address = next(m[0] for line in server.stdout if (m := re.search(r"http://[\d.]+:\d+", line)))
            asked = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
            request = urllib.request.Request(
                f"{address}/v1/chat/completions",
                json.dumps(asked).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                answer.read()
            server.send_signal(signal.SIGINT)
            server.stdout.read()
        return self._read()


if __name__ == "__main__":
    sys.exit(main())
