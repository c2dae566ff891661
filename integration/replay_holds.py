"""Replay holds: real runs, fed again token by token and executed again action by action, counted.

    python integration/replay_holds.py --runs 200 [--model NAME] [--home FOLDER]

Half of the runs are sampled by a local policy (a tiny random one unless --model names another), a tenth ask
the clock or draw at random, and the others are the oracles of function tasks and of the other domains. Exit
code 1 where a prompt differs, or where something drifted that is neither time nor randomness.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import serving_profile
from nano_coder.agent.prompt import offered_tools
from nano_coder.models.opening import open_policy, open_renderer
from nano_coder.models.replayed import PromptRenderer
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.run.replay import Executed, Refed, execute, refeed
from nano_coder.sandbox.backend import open_sandbox
from nano_rl.gather.rollouts import collect
from nano_rl.tasks.make import make_tasks
from nano_rl.tasks.suite import find_suite
from nano_rl.tiny_model import build_tiny
from nano_shared.profile import InterfaceProfile
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Split, Task, ToolCall, Trajectory

DOMAINS = ("shell", "sql", "data", "logic", "workplace")
CLOCKS = (
    "date",
    "python -m pytest -q test_a.py",
    "python -c 'import uuid; print(uuid.uuid4())'",
    "head -c 8 /dev/urandom | od -An -tx1 > noise; cat noise",
    "touch b; ls -l --time-style=full-iso",
    "python -c 'import random; print(random.random())'",
)
SUBMIT = "@submit"
ROOT = Path(__file__).parents[1]


def main() -> int:
    arguments = _arguments()
    with _home(arguments.home) as home, LogStore.open(home / "log.db") as store:
        runtime = Runtime(policy=ScriptedPolicy([]), sandbox=open_sandbox(), store=store)
        model = arguments.model or str(_tiny(home))
        sampled = _sampled(arguments.runs // 2, model, runtime)
        clocks = arguments.runs // 10
        runs = [
            *sampled,
            *_oracles(arguments.runs - len(sampled) - clocks, runtime),
            *_clocks(clocks, runtime),
        ]
        print(f"{len(runs)} runs: {dict(Counter(str(run.stop) for run in runs))}", flush=True)
        logged = [store.get(run.id) for run in runs]  # as the log gives them back, not as they were made
        prompts = _refed(logged, store)
        drifts = _executed(logged, runtime)
    return int(not (prompts and drifts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--model")
    parser.add_argument("--home", type=Path, help="Where the log goes; else it is thrown away.")
    return parser.parse_args()


@contextmanager
def _home(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="nano-replay-") as made:
        yield Path(made)


def _tiny(home: Path) -> Path:
    texts = [file.read_text() for file in sorted(ROOT.glob("shared/nano_shared/*.py"))]
    return build_tiny(home / "tiny", texts, vocab_size=1024, hidden=64, layers=2)


# --------------------------------------------------------------------------------------------- runs


def _tasks(n: int) -> list[Task]:
    """Function tasks and those of the other domains in turn."""
    functions = make_tasks(levels=range(4), n=-(-n // 2), seed=3, split=Split.TRAIN)
    others = (find_suite(name) for name in DOMAINS)
    views = [(suite, view) for suite in others for view in suite.views if not view.extra]
    drawn = (suite.make(view, Split.TRAIN, seed) for seed in itertools.count() for suite, view in views)
    return [*functions, *itertools.islice(drawn, n // 2)]


def _sampled(n: int, model: str, runtime: Runtime) -> list[Trajectory]:
    opened = open_policy(model, dtype="float32")
    sampled = replace(
        runtime,
        policy=opened.policy,
        profile=opened.profile,
        policy_name=opened.name,
        sampling=Sampling(temperature=1.0, max_tokens=48),
    )
    return collect(_tasks(n), sampled, seed=1, concurrency=16)


def _oracles(n: int, runtime: Runtime) -> Iterator[Trajectory]:
    """One run each of `n` oracles, whose texts are byte tokens."""
    for task in _tasks(n):
        yield _scripted(task, _texts(task, runtime.profile), runtime)


def _clocks(n: int, runtime: Runtime) -> Iterator[Trajectory]:
    """Runs that ask the clock or draw at random, in turn."""
    task = Task(key="clocks", prompt="Ask the clock.", files={"test_a.py": "def test_a():\n    pass\n"})
    tools = offered_tools(runtime.profile, task)
    for command in itertools.islice(itertools.cycle(CLOCKS), n):
        call = ToolCall(name="shell", arguments={"command": command})
        yield _scripted(task, [DIALECTS[runtime.profile.dialect].render("", (call,), tools), SUBMIT], runtime)


def _scripted(task: Task, texts: list[str], runtime: Runtime) -> Trajectory:
    policy = ScriptedPolicy(texts, tokens=True)
    return grade_run(run_task(task, replace(runtime, policy=policy, policy_name="scripted")), runtime)


def _texts(task: Task, profile: InterfaceProfile) -> list[str]:
    profile = serving_profile(profile, task)
    dialect, tools = DIALECTS[profile.dialect], offered_tools(profile, task)
    return [dialect.render(action.thought, (action,), tools) for action in task.oracle or ()]


# ------------------------------------------------------------------------------------------- proofs


def _refed(runs: list[Trajectory], store: LogStore) -> bool:
    started, readers = time.monotonic(), dict[str, PromptRenderer | None]()
    results: list[Refed] = []
    for run in runs:
        if run.template_hash not in readers:
            readers[run.template_hash] = open_renderer(run)
        results.append(refeed(run, readers[run.template_hash], store.blobs))
    whole = sum(result.holds and result.proved == len(result.prompts) for result in results)
    turns = sum(len(result.prompts) for result in results)
    tokens = sum(prompt.tokens for result in results for prompt in result.prompts if prompt.identical)
    print(
        f"re-fed: {whole} of {len(results)} runs token-identical ({turns} prompts, {tokens} tokens,"
        f" {time.monotonic() - started:.0f} s); bar: all"
    )
    for result in results:
        if not result.holds:
            print(f"  run {result.run}: {result.first_difference or result.differences}")
    return whole == len(results)


def _executed(runs: list[Trajectory], runtime: Runtime) -> bool:
    started = time.monotonic()
    results: list[Executed] = [execute(run, runtime.sandbox, runtime.store.blobs) for run in runs]
    held = sum(result.holds for result in results)
    drifts = [drift for result in results for drift in result.drifts]
    print(
        f"re-executed: {held} of {len(results)} runs drift by nothing but time and randomness"
        f" ({sum(r.actions for r in results)} actions, {len(drifts)} drifts,"
        f" {time.monotonic() - started:.0f} s); bar: all"
    )
    for cause, count in Counter(str(drift.cause) for drift in drifts).most_common():
        example = next(drift for drift in drifts if drift.cause == cause)
        print(f"  {cause}: {count}, as {example.logged[:60]!r} -> {example.now[:60]!r} ({example.what})")
    return held == len(results)


if __name__ == "__main__":
    sys.exit(main())
