"""Size and shape of the library: what a reader has to go through, counted.

    python benchmarks/house.py              prints every figure, its value before the rebuild, and its bar
    python benchmarks/house.py --write      also writes docs/results/house.json, from which `make docs`
                                            fills the tables of docs/design.md
    python benchmarks/house.py --entered    names the files that each phase of one trajectory enters

The files of one trajectory are those whose functions are called while a task is run, its result graded and
one update learned from it, in the tiny training of AC-15 in tests/rl/test_train.py: a profile function sees
every call in this process, of every thread. Code that runs only at import or in the jail is not counted.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = {name: ROOT / name for name in ("nano_coder", "nano_rl")} | {
    "nano_shared": ROOT / "shared" / "nano_shared"
}
LEAVES = ("formats", "commands", "cli.py")
"""of nano_rl: what the core runs without"""
OF_EXTENSIONS = ("objective", "critic", "logs", "reward")
"""sections of the training config whose settings belong to objectives, rewards, or training on logs"""
RESULT = ROOT / "docs" / "results" / "house.json"

BEFORE_AND_BAR = {
    "files that one trajectory passes, task to gradient": ("74", "≤ 40"),
    "of these: running the task": ("40", ""),
    "of these: grading": ("18", ""),
    "of these: one update": ("29", "≤ 15"),
    "of our modules loaded by `import nano_rl.learn.update`": ("287", "≤ 90"),
    "of these: of nano_coder": ("", "0"),
    "contracts of imports broken (`lint-imports`)": ("8 circles", "0"),
    "library lines": ("59,065", "≤ 53,000"),
    "library modules": ("557", "≤ 400"),
    "core and plug-ins together, lines": ("59,065", "≤ 80,000"),
    "lines of nano_rl without leaves and commands": ("~19,000", "≤ 13,000"),
    "names in `__all__` of nano_coder": ("54", "≤ 30"),
    "of these: defined elsewhere": ("43", "0"),
    "options shown by `nano-rl train --help`": ("86", "≤ 22"),
    "options shown by all commands": ("366", "≤ 220"),
    "settings of the training config": ("77", ""),
    "of these: in the core": ("", "≤ 45"),
    "class and alias names defined twice": ("57", "0"),
    "function length, 90th percentile": ("20", "≤ 22"),
    "broad excepts per 1,000 lines": ("0.24", "≤ 0.25"),
    "test lines ÷ library lines": ("0.53", "≥ 0.65"),
}
"""figure -> its value before the rebuild, as the issue that asked for it counted, and its bar"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Size and shape of the library, counted.")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--entered", action="store_true", help="name the files of each phase of a trajectory")
    options = parser.parse_args()
    # counted before anything else is imported here
    figures: dict[str, str] = {**loaded_by_update(), **sizes(), **names(), **functions(), **contracts()}
    figures |= {**options_shown(), **settings(), **public_names()}
    phases = one_trajectory()
    entered = set().union(*phases.values())
    figures["files that one trajectory passes, task to gradient"] = str(len(entered))
    for phase, files in phases.items():
        figures[f"of these: {phase}"] = str(len(files))
        if options.entered:
            print(f"{phase}: {len(files)}", *sorted(files), sep="\n    ")
    rows = [
        {"figure": figure, "before": before, "now": figures[figure], "bar": bar}
        for figure, (before, bar) in BEFORE_AND_BAR.items()
    ]
    for row in rows:
        print(f"{row['figure']:56} {row['before']:>10} {row['now']:>10} {row['bar']:>10}")
    if options.write:
        packages = [
            {"package": name, "modules": len(files), "lines": sum(map(lines, files))}
            for name, files in {**library(), **plugins(), "tests": tests()}.items()
        ]
        found = {"command": "python benchmarks/house.py --write", "rows": rows, "packages": packages}
        RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


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
    total = sum(map(lines, modules))
    core = [
        path for path in library()["nano_rl"] if path.relative_to(PACKAGES["nano_rl"]).parts[0] not in LEAVES
    ]
    whole = total + sum(lines(path) for files in plugins().values() for path in files)
    return {
        "library lines": f"{total:,}",
        "library modules": str(len(modules)),
        "core and plug-ins together, lines": f"{whole:,}",
        "lines of nano_rl without leaves and commands": f"{sum(map(lines, core)):,}",
        "test lines ÷ library lines": f"{sum(map(lines, tests())) / whole:.2f}",
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
    lengths, broad, total = [], 0, 0
    for path, tree in trees():
        total += lines(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
            if isinstance(node, ast.ExceptHandler):
                broad += node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
    return {
        "function length, 90th percentile": str(sorted(lengths)[len(lengths) * 9 // 10]),
        "broad excepts per 1,000 lines": f"{1000 * broad / total:.2f}",
    }


def loaded_by_update() -> dict[str, str]:
    code = "import sys, nano_rl.learn.update; print(*[m for m in sys.modules if m.startswith('nano_')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    loaded = done.stdout.split()
    return {
        "of our modules loaded by `import nano_rl.learn.update`": str(len(loaded)),
        "of these: of nano_coder": str(sum(module.startswith("nano_coder") for module in loaded)),
    }


def contracts() -> dict[str, str]:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    told = [line for line in done.stdout.splitlines() if line.startswith("Contracts:")]
    return {
        "contracts of imports broken (`lint-imports`)": told[0].split(", ")[1].split()[0] if told else "?"
    }


def options_shown() -> dict[str, str]:
    """Options that `--help` shows, of every command; --help and --version themselves are not counted."""
    counts: dict[str, int] = {}

    def walk(command: Any, path: str) -> None:
        if hasattr(command, "load"):
            for name in command.targets:
                walk(command.load(name), f"{path} {name}")
            return
        counts[path] = sum(
            param.param_type_name == "option" and not param.hidden and "--help" not in param.opts
            for param in command.params
        )

    for program, module in (("nano-coder", "nano_coder.cli"), ("nano-rl", "nano_rl.cli")):
        cli = importlib.import_module("typer.main").get_command(importlib.import_module(module).cli)
        walk(cli, program)
    return {
        "options shown by `nano-rl train --help`": str(counts["nano-rl train"]),
        "options shown by all commands": str(sum(counts.values())),
    }


def settings() -> dict[str, str]:
    from pydantic import BaseModel

    from nano_rl.config.training import TrainConfig

    def leaves(model: type[BaseModel], without: tuple[str, ...] = ()) -> int:
        count = 0
        for name, field in model.model_fields.items():
            kind = field.annotation
            nested = isinstance(kind, type) and issubclass(kind, BaseModel)
            count += (leaves(kind) if nested else 1) if name not in without else 0  # type: ignore[arg-type]
        return count

    return {
        "settings of the training config": str(leaves(TrainConfig)),
        "of these: in the core": str(leaves(TrainConfig, OF_EXTENSIONS)),
    }


def public_names() -> dict[str, str]:
    public = elsewhere = 0
    for path, tree in trees():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        exports = [
            n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ]
        if PACKAGES["nano_coder"] not in path.parents or not exports:
            continue
        exported = importlib.import_module(module).__all__
        here = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for node in tree.body:
            if isinstance(node, ast.Assign):
                here |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                here.add(node.target.id)
        public += len(exported)
        elsewhere += len(set(exported) - here)
    return {"names in `__all__` of nano_coder": str(public), "of these: defined elsewhere": str(elsewhere)}


@contextmanager
def entering(files: set[str]) -> Iterator[None]:
    """Collect the files of the library whose functions are called meanwhile, by whichever new thread too."""
    folders = tuple(f"{folder}/" for folder in PACKAGES.values())

    def see(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(folders):
            files.add(str(Path(code.co_filename).relative_to(ROOT)))

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def one_trajectory() -> dict[str, set[str]]:
    """The files of each phase, from a task to the gradient that its run gives."""
    import torch

    from nano_coder.agent.profiles import COMPACT_1
    from nano_coder.agent.prompt import first_messages
    from nano_coder.models.opening import local_policy, open_weights
    from nano_coder.models.scripted import ScriptedPolicy
    from nano_coder.run.execution import Runtime, grade_run, run_task
    from nano_coder.sandbox.backend import open_sandbox
    from nano_rl.config.training import TrainConfig
    from nano_rl.gather.rollouts import collect
    from nano_rl.gather.sources import Sources
    from nano_rl.learn.config import GuardConfig, LogsConfig
    from nano_rl.learn.model.learner import prepare
    from nano_rl.learn.update import Updater
    from nano_rl.logs.lineage import lineage
    from nano_rl.logs.reader import read_logs
    from nano_rl.tasks.make import make_tasks
    from nano_rl.tiny_model import build_tiny
    from nano_rl.train import train
    from nano_shared.store import LogStore
    from nano_shared.types import Sampling, Split

    torch.set_num_threads(1)
    phases: dict[str, set[str]] = {"running the task": set(), "grading": set(), "one update": set()}
    tasks = make_tasks(levels=[0], n=6, seed=1, split=Split.TRAIN, views=["copy"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [m.content for task in tasks for m in first_messages(COMPACT_1, task, ())]
        texts += ["@submit\n" + str(number) for number in range(99)]
        tiny = build_tiny(folder / "tiny", texts, hidden=64, layers=2, max_positions=256, vocab_size=400)
        opened = open_weights(str(tiny))
        store = LogStore.open(folder / "log.db")
        sampling = Sampling(temperature=1.0, max_tokens=12)
        runtime = Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store, sampling=sampling)
        # a model that was just made calls no tool: a scripted one submits
        scripted = replace(runtime, policy=ScriptedPolicy(["@submit\n1"]))
        with entering(phases["running the task"]):
            run = run_task(tasks[0], scripted)
        live = replace(runtime, policy=local_policy(opened.loaded, opened.profile))
        with entering(phases["running the task"]):
            run_task(tasks[0], live, seed=5)
        with entering(phases["grading"]):
            grade_run(run, runtime)
        for index, each in enumerate(collect(tasks, live, group_size=4, seed=5)):
            assert each.verdict is not None
            mixed = each.verdict.model_copy(update={"reward": float(index % 2), "grader": "house-1"})
            store.add_verdict(each.id, mixed)
        template = local_policy(opened.loaded, opened.profile).template_hash
        Updater.learn = watched(Updater.learn, phases["one update"])  # type: ignore[method-assign]
        config = TrainConfig(
            steps=1,
            prompts_per_step=2,
            group_size=0,
            guards=GuardConfig(patience=100),
            logs=LogsConfig(uses=None),
        )
        groups = read_logs([store], opened, template, lineage(opened), config).groups
        model = prepare(opened.loaded.model, lora_rank=0, seed=0)
        (folder / "training").mkdir()
        train(model, opened, runtime, Sources(logged=groups), config, folder / "training", lambda *_: None)
        store.close()
    return phases


def watched(function: Callable[..., Any], files: set[str]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        with entering(files):
            return function(*arguments, **named)

    return called


if __name__ == "__main__":
    sys.exit(main())
