"""One database under load: admission of many runs, many writers, writers that are killed, and ingest.

    python benchmarks/log_scale.py [--runs 100000] [--folder DIR] [--keep] [--writers 16]

Prints each figure against its bar, and the CPU time beside the time on the wall, since other programs and the
disk decide about the latter. The runs have 3 turns of about 300 tokens, real ones of a tiny model: of 50 that
were scored, each is logged many times under other tasks and rewards. One in ten cannot train.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nano_shared import schema
from nano_shared.logged_run import LoggedRun
from nano_shared.schema import run_row, task_row, tool_call_rows, turn_row, verdict_row
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import StopReason, Trajectory

PER_TASK = 8
CPU = "cpu"
"""begins the last line of a writer; the others begin with the id of a run"""
BATCH = 500
ADMIT_SECONDS, GROWTH_MB, TURNS_A_SECOND = 60.0, 32.0, 1000.0
TEXTS = ("@read_file path=sums.py", "@edit_file path=sums.py line=2\n    return a + b", "@submit")


def pool(folder: Path, count: int = 50) -> list[Trajectory]:
    """Runs whose tokens are a tiny model's, with the log-probs that it gives them."""
    from integration.tiny_model import build_tiny
    from nano_coder.agent.dialects.dialect import DIALECTS
    from nano_coder.agent.loop import observation_messages
    from nano_coder.agent.profiles import COMPACT_1, first_messages
    from nano_coder.models.opening import local_policy, open_weights
    from nano_shared.policy import Conversation
    from nano_shared.types import (
        Completion,
        Finish,
        Observation,
        Sampling,
        Task,
        Trust,
        Turn,
        TurnTokens,
        Verdict,
    )

    files = {"sums.py": "def add(a, b):\n    return a - b\n"}
    tasks = [Task(key=f"sum-{n}", prompt=f"Mend add for number {n}.", files=files) for n in range(count)]
    messages = [first_messages(COMPACT_1, task, sorted(files)) for task in tasks]
    texts = [message.content for some in messages for message in some]
    opened = open_weights(
        str(build_tiny(folder / "model", [*texts, *TEXTS], hidden=64, layers=2, max_positions=1024))
    )
    policy = local_policy(opened.loaded, opened.profile)
    runs = []
    for task, first in zip(tasks, messages, strict=True):
        conversation, turns = Conversation(first), []
        for index, text in enumerate(TEXTS):
            context = policy.template.delta(conversation)
            sampled = (*policy.template.encoder.text(text), opened.loaded.tokenizer.eos_token_id)
            (scores,) = policy.engine.score([(*conversation.tokens, *context, *sampled)])
            tokens = TurnTokens(
                context_ids=context, sampled_ids=sampled, logprobs=tuple(scores[-len(sampled) :])
            )
            parsed = DIALECTS[COMPACT_1.dialect].parse(text, COMPACT_1.tools)
            seen = Observation(tool=parsed.calls[0].name, ok=True, text=files["sums.py"], started=0, ended=1)
            completion = Completion(
                text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id=policy.id
            )
            turns.append(
                Turn(
                    index=index, completion=completion, calls=parsed.calls, parser=COMPACT_1.dialect,
                    observations=(seen,), started=float(index), ended=index + 0.5,
                )
            )  # fmt: skip
            conversation.record(completion)
            for message in observation_messages(turns[-1]):
                conversation.append(message)
        verdict = Verdict(reward=1.0, trust=Trust.HIDDEN, grader="benchmark 1", graded_hash="-")
        runs.append(
            Trajectory(
                id="-", task=task, turns=tuple(turns), stop=StopReason.FINISHED, runtime_version="0",
                profile=COMPACT_1.name, profile_hash=COMPACT_1.hash, tools_hash=COMPACT_1.tools_hash,
                template_hash=policy.template_hash, policy=str(folder / "model"), started=0.0, ended=9.0,
                verdict=verdict,
            )
        )  # fmt: skip
    return runs


def fill(log: Path, runs: list[Trajectory], count: int) -> None:
    """`count` runs, eight to a task, one in ten of which cannot train."""
    LogStore.open(log).close()
    rng = random.Random(0)
    written = [(run_row(r, "-"), [(turn_row("-", t), tool_call_rows("-", t)) for t in r.turns],
                verdict_row("-", r.verdict, 0.0)) for r in runs if r.verdict]  # fmt: skip
    import sqlalchemy as sa

    engine = sa.create_engine(f"sqlite:///{log}")
    task: dict[str, object] = {}
    for start in range(0, count, BATCH):
        tasks, heads, turns, calls, verdicts = [], [], [], [], []
        for number in range(start, min(count, start + BATCH)):
            run, rows, verdict = written[number // PER_TASK % len(written)]
            if number % PER_TASK == 0:
                key = f"task-{number // PER_TASK:07d}"
                task = task_row(runs[number // PER_TASK % len(runs)].task.model_copy(update={"key": key}))
                tasks.append(task)
            name, damage = f"run-{number:09d}", rng.random()
            changed = {"stop": "sandbox_error"} if damage < 0.02 else {}
            changed |= {"template_hash": "sha256:0"} if 0.02 < damage < 0.06 else {}
            heads.append(run | {"id": name, "task_id": task["id"], "started": float(number)} | changed)
            for turn, acted in rows:
                bare = dict.fromkeys(("token_row", "context_ids", "sampled_ids", "logprobs"))
                turns.append(
                    turn | {"run_id": name, "started": float(number)} | (bare if damage > 0.96 else {})
                )
                calls += [call | {"run_id": name} for call in acted]
            verdicts.append(verdict | {"run_id": name, "reward": float(rng.random() < 0.5)})
        with engine.begin() as connection:
            for table, rows in ((schema.tasks, tasks), (schema.runs, heads), (schema.turns, turns),
                                (schema.tool_calls, calls), (schema.verdicts, verdicts)):  # fmt: skip
                if rows:
                    connection.execute(table.insert(), rows)
    engine.dispose()


COLUMNS = """
import json, sys
from nano_rl.logs.admission import TargetPolicy, survey
from nano_shared.run_facts import RunFilter
from nano_shared.store import LogStore
report = survey(LogStore.open(sys.argv[1]), RunFilter(), TargetPolicy())
print(json.dumps(report.as_dict()))
"""
COMMAND = """
import sys
from nano_rl.cli import cli
log, model = sys.argv[1:]
cli(["admit", "--log", log, "--model", model, "--json"], standalone_mode=False)
"""
PEAK = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from peak_memory import peak_kb
print(peak_kb(), file=sys.stderr)
"""


def admitted(log: Path, model: Path | None) -> tuple[float, float, float, dict[str, object]]:
    """Seconds on the wall and of CPU, peak memory in MB and the report: of `nano-rl admit`, or of the columns
    without a model."""
    code = COMMAND if model else COLUMNS
    started, before = time.monotonic(), _cpu_of_children()
    done = subprocess.run(
        [sys.executable, "-c", code + PEAK, str(log), *([str(model)] if model else [])],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, cpu = time.monotonic() - started, _cpu_of_children() - before
    report: dict[str, object] = json.loads(done.stdout)
    return seconds, cpu, int(done.stderr.split()[-1]) / 1024, report


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ------------------------------------------------------------------------------------ writers


def write(log: str, template: Trajectory, runs: int, told: str, ready: object, go: object) -> None:
    """A writer: each run turn by turn, and a line in `told` for each turn that the log has confirmed."""
    with LogStore.open(log) as store, open(told, "a") as confirmed:
        ready.release()  # type: ignore[attr-defined]
        go.wait()  # type: ignore[attr-defined]
        begun = time.process_time()
        for _ in range(runs):
            bare = {"id": new_run_id(), "turns": (), "stop": None, "ended": None, "verdict": None}
            run = template.model_copy(update={**bare, "started": time.time()})
            store.begin(run)
            for turn in template.turns:
                store.append_turn(run.id, turn)
                print(run.id, turn.index, file=confirmed, flush=True)
            store.finish(run.id, stop=StopReason.FINISHED, ended=time.time())
        print(CPU, time.process_time() - begun, file=confirmed)


@dataclass(frozen=True, slots=True)
class Written:
    """What writers did: seconds on the wall and of CPU (0 of those that were killed), and every turn that
    one of them was told is logged."""

    seconds: float
    cpu: float
    confirmed: list[tuple[str, int]]


def writers(log: Path, template: Trajectory, count: int, runs: int, *, kill: bool) -> Written:
    """`kill` ends them by SIGKILL, one after the other at random moments, while the others go on."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Semaphore(0), context.Event()
    told = [log.parent / f"told-{kill}-{count}-{number}" for number in range(count)]
    LogStore.open(log).close()
    processes = [
        context.Process(target=write, args=(str(log), template, runs, str(path), ready, go)) for path in told
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    started = time.monotonic()
    go.set()
    if kill:
        rng = random.Random(0)
        for process in processes:
            time.sleep(rng.random() * 0.2)
            if process.pid:
                os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
    seconds = time.monotonic() - started
    lines = [line.split() for path in told if path.exists() for line in _lines(path)]
    return Written(
        seconds=seconds,
        cpu=sum(float(spent) for name, spent in lines if name == CPU),
        confirmed=[(run, int(turn)) for run, turn in lines if run != CPU],
    )


def _lines(path: Path) -> Iterator[str]:
    """But for one that its writer did not live to end."""
    return (line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


def missing(log: Path, template: Trajectory, confirmed: list[tuple[str, int]]) -> tuple[int, int, str]:
    """Confirmed turns that are not there, runs that are not a whole beginning of what was written, and what
    SQLite thinks of the file."""
    turns, held, broken = template.turns, set[tuple[str, int]](), 0
    with LogStore.open(log) as store:
        for run in store.trajectories():
            broken += run.turns != turns[: len(run.turns)] or (run.stop is not None and run.turns != turns)
            held |= {(run.id, turn.index) for turn in run.turns}
    with closing(sqlite3.connect(log)) as connection:
        (sound,) = connection.execute("PRAGMA integrity_check").fetchone()
    return len([turn for turn in confirmed if turn not in held]), broken, sound


def ingest(log: Path, template: Trajectory, runs: int) -> tuple[float, float]:
    """Turns a second on the wall and of CPU, of finished runs that are added as `log import` adds them."""

    def finished() -> Iterator[LoggedRun]:
        for number in range(runs):
            run = template.model_copy(update={"id": f"whole-{number:09d}", "started": float(number)})
            yield LoggedRun(trajectory=run, verdicts=(run.verdict,) if run.verdict else ())

    with LogStore.open(log) as store:
        started, begun = time.monotonic(), time.process_time()
        store.merge(finished)
        turns = runs * len(template.turns)
        return turns / (time.monotonic() - started), turns / (time.process_time() - begun)


def bar(name: str, value: str, holds: bool, wanted: str) -> bool:
    print(f"{name:<38} {value:>34}   {wanted:<20} {'holds' if holds else 'MISSED'}", flush=True)
    return holds


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--runs", type=int, default=100_000)
    asked.add_argument("--writers", type=int, default=16)
    asked.add_argument("--writer-runs", type=int, default=100)
    asked.add_argument("--folder", type=Path, help="where the databases are made; default: a temporary one")
    asked.add_argument("--keep", action="store_true", help="leave the databases and the tiny model there")
    given = asked.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="log-scale-", dir=given.folder))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {given.runs} runs", flush=True)
    try:
        return measure(folder, given.runs, given.writers, given.writer_runs)
    finally:
        if given.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


def measure(folder: Path, count: int, processes: int, each: int) -> int:
    runs = pool(folder)
    held = [*_admission(folder, runs, count), *_writing(folder, runs[0], processes, each)]
    rate, of_cpu = ingest(folder / "whole.db", runs[0], max(count // 10, 500))
    told = f"{rate:.0f} turns/s, {of_cpu:.0f} per CPU s"
    held.append(bar("ingest of whole runs, one process", told, rate >= TURNS_A_SECOND, _RATE))
    return 0 if all(held) else 1


_RATE = f"{TURNS_A_SECOND:.0f} turns/s"


def _admission(folder: Path, runs: list[Trajectory], count: int) -> Iterator[bool]:
    small, large = folder / "small.db", folder / "large.db"
    for log, size in ((small, max(count // 10, PER_TASK)), (large, count)):
        fill(log, runs, size)
    print(f"database of {large.stat().st_size / 2**20:.0f} MB", flush=True)
    for name, model in (("columns alone", None), ("with a tiny model", folder / "model")):
        _, _, before, _ = admitted(small, model)
        seconds, cpu, peak, report = admitted(large, model)
        told = f"{seconds:.1f} s, CPU {cpu:.1f} s, {peak:.0f} MB"
        yield bar(f"admit, {name}", told, seconds < ADMIT_SECONDS, f"under {ADMIT_SECONDS:.0f} s")
        more = peak - before
        wanted = f"under {GROWTH_MB:.0f} MB more"
        yield bar("  memory, against a tenth of the runs", f"{more:+.0f} MB", more < GROWTH_MB, wanted)
        yield bar("  runs judged", str(report["runs"]), report["runs"] == count, "all")


def _writing(folder: Path, template: Trajectory, processes: int, each: int) -> Iterator[bool]:
    log = folder / "written.db"
    written = writers(log, template, processes, each, kill=False)
    lost, broken, sound = missing(log, template, written.confirmed)
    turns = len(written.confirmed)
    whole = turns == processes * each * len(template.turns) and not broken and sound == "ok"
    yield bar(
        f"{processes} writers, turn by turn", f"{lost} lost of {turns}", lost == 0 and whole, "none lost"
    )
    rate = turns / written.seconds
    told = f"{rate:.0f} turns/s, {turns / written.cpu:.0f} per CPU s"
    yield bar("  ingest, all together", told, rate >= TURNS_A_SECOND, _RATE)
    log = folder / "killed.db"
    killed = writers(log, template, processes, _ENDLESS, kill=True)
    lost, broken, sound = missing(log, template, killed.confirmed)
    told = f"{lost} lost of {len(killed.confirmed)}, {broken} broken"
    yield bar(f"{processes} writers, SIGKILL", told, not lost and not broken and sound == "ok", "consistent")


_ENDLESS = 100_000
"""runs of a writer that is to be killed"""


if __name__ == "__main__":
    sys.exit(main())
