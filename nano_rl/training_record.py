"""What a training writes beside its checkpoints (command, events, rollouts, times, used runs), the callbacks
of `train`, and a line per step where no view is installed."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from nano_coder import __version__ as runtime_version
from nano_coder.installed_views import VIEWS, TrainingView
from nano_rl.learn.groups import Group
from nano_rl.learn.metrics import SHORTEST, SUCCESS, MetricsRow, RowWriter, read_rows
from nano_shared.command_line import Console
from nano_shared.errors import CheckpointError, GuardTripped, NanoError, UsageError
from nano_shared.extension_points import Extensions, call_extension, described, takes
from nano_shared.files import full_disk_explained, write_text
from nano_shared.printable import printable
from nano_shared.types import Trajectory, outcome

if TYPE_CHECKING:
    from nano_coder.run.execution import Runtime
    from nano_rl.config import TrainConfig
    from nano_shared.store import LogStore

ROLLOUTS = "rollouts.jsonl"


class Rollout(BaseModel):
    """The fields of a rollout that reports use; the run itself is in the log."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    level: int | None = None
    family: str | None = None
    reward: float | None = None
    outcome: float | None = None
    """reward of the tests alone"""
    tampered: bool = False
    control: bool = False
    """an impossible control, which is never trained on"""

    @property
    def success(self) -> bool | None:
        return None if self.outcome is None else self.outcome >= 1


def read_rollouts(path: Path) -> dict[int, list[Rollout]]:
    """Step -> its rollouts, in order; empty without a file."""
    rows = read_rows(path) if path.exists() else []
    return {int(row["step"]): [Rollout.model_validate(run) for run in row["runs"]] for row in rows}


def rollout_row(run: Trajectory, *, control: bool = False) -> dict[str, Any]:
    rollout = Rollout(
        id=run.id, level=run.task.level, family=run.task.family, reward=run.reward,
        outcome=outcome(run.verdict), tampered=bool(run.verdict and run.verdict.tampering), control=control,
    )  # fmt: skip
    return rollout.model_dump(mode="json", exclude_defaults=True)


EVENTS = "events.jsonl"


class EventKind(StrEnum):
    STARTED = "started"
    RESUMED = "resumed"
    WORKER = "worker"
    """a rollout worker was lost and replaced, or a server left out or taken back"""
    GUARD = "guard"
    STOPPED = "stopped"
    FINISHED = "finished"


class TrainingEvent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    kind: EventKind
    step: int
    text: str = ""


def note(folder: Path, kind: EventKind, step: int, text: str = "") -> None:
    """Append an event; events are kept when a training is resumed."""
    event = TrainingEvent(time=time.time(), kind=kind, step=step, text=text)
    with (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event.model_dump(mode="json")) + "\n")


def read_events(folder: Path) -> list[TrainingEvent]:
    path = folder / EVENTS
    return [TrainingEvent.model_validate(row) for row in read_rows(path)] if path.exists() else []


RECORD = "training.json"
TOKENIZER = "tokenizer.json"
"""file name of the policy's tokenizer, with which a report decodes sampled tokens"""


class TrainArguments(BaseModel):
    """What is trained on what: the arguments of `nano-rl train` beside the settings."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    model: str | None = None
    tasks: Path | None = None
    held_out: Path | None = None
    from_logs: bool = False
    fresh: int | None = None
    """with `from_logs`: what fresh rollouts fill a group up to; 0 where they do not"""
    curriculum: str | None = None
    logs: tuple[str, ...] = ()
    """the first is written to; none: the default one"""
    envs: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    device: str | None = None
    """None: as configured"""
    agent: str | None = None
    """command of an external agent"""
    agent_folders: tuple[str, ...] = ()
    limit: dict[str, int | float | str] = {}

    @field_validator("curriculum", mode="before")
    @classmethod
    def _levels(cls, name: Any) -> Any:
        """`--curriculum` alone, and a record of an older version."""
        return "levels" if name in ("1", True) else name or None


class TrainingRecord(TrainArguments):
    """The arguments and settings of a training, as it was last started; files by their absolute paths."""

    log: str
    """path or URL without password of the log that fresh runs are written to"""
    more_logs: tuple[str, ...] = ()
    """further logs that --from-logs reads, in the same form"""
    config: dict[str, Any]
    nano: str
    """version of the code"""
    started: float

    @property
    def reachable_log(self) -> str | None:
        """The log if its address suffices to open it; None for a server, whose password is not recorded."""
        return None if "://" in self.log else self.log

    @property
    def reachable_logs(self) -> tuple[str, ...]:
        """All logs if their addresses suffice to open them, else none."""
        logs = (self.log, *self.more_logs)
        return () if any("://" in log for log in logs) else logs

    def write(self, folder: Path) -> None:
        write_text(folder / RECORD, self.model_dump_json(indent=2) + "\n", CheckpointError)


def write_record(
    folder: Path, given: TrainArguments, config: TrainConfig, runtime: Runtime, further: Sequence[LogStore],
    tokenizer: Any,
) -> None:  # fmt: skip
    """Keep what was given, and the tokenizer, for --resume and `nano-rl report`."""
    agent, environments = runtime.settings.agent, runtime.environments
    now = {
        "model": runtime.policy_name, "logs": (),
        "envs": environments.references if environments.opened else (),
        "tasks": given.tasks and given.tasks.resolve(),
        "held_out": given.held_out and given.held_out.resolve(),
        "agent": agent.command if agent else None,
        "agent_folders": tuple(map(str, agent.mounts)) if agent else (),
    }  # fmt: skip
    TrainingRecord(
        **{**dict(given), **now}, log=runtime.store.url, more_logs=tuple(store.url for store in further),
        config=config.model_dump(mode="json"), nano=runtime_version, started=time.time(),
    ).write(folder)  # fmt: skip
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(folder / TOKENIZER))


def read_record(folder: Path) -> TrainingRecord | None:
    """The record in `folder`; None if there is none. Raises UsageError for an invalid file."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        return TrainingRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        raise UsageError(f"{path} is no record of a training: {first['loc']} {first['msg']}") from None


TimeSpan = tuple[float, float]
"""begin and end, unix seconds"""


class Phases:
    """Times the phases of a step: `with phases("rollout"): ...`. What follows `metrics` is counted in the
    next step."""

    def __init__(self, *, ahead: int = 0) -> None:
        """`ahead`: number of steps before a step in which its rollouts may have started."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = deque([time.time()], maxlen=1 + ahead)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] += time.monotonic() - started

    def metrics(self, runs: Sequence[Trajectory] = (), *, trained_tokens: float = 0.0) -> dict[str, float]:
        """`seconds_<phase>`, `step_time`, and of the runs started since the last call (with `ahead`, since
        that many calls before it): `seconds_generate`, in which an agent waited for tokens and no tool ran,
        `seconds_sandbox`, in which a tool ran, `seconds_grade`, the rest of the rollout phase;
        `tokens_rollout` and `tokens_observed`, sampled and of observations; and `tokens_per_second_...` where
        their time is above SHORTEST."""
        fresh = [run for run in runs if run.started >= self._began[0]]
        seconds = {f"seconds_{phase}": spent for phase, spent in self._seconds.items()}
        sampled = float(sum(run.num_sampled_tokens for run in fresh))
        later = (turn.completion.tokens for run in fresh for turn in run.turns[1:])
        observed = float(sum(len(tokens.context_ids) for tokens in later if tokens))
        if fresh:
            tools = merge(interval for run in fresh for interval in _tools(run))
            either = merge([*tools, *(interval for run in fresh for interval in _completions(run))])
            seconds["seconds_sandbox"] = length(tools)
            seconds["seconds_generate"] = length(either) - length(tools)
            within = seconds["seconds_sandbox"] + seconds["seconds_generate"]
            seconds["seconds_grade"] = max(0.0, seconds.get("seconds_rollout", 0.0) - within)
        self._seconds.clear()
        now = time.time()
        seconds["step_time"] = now - self._began[-1]
        self._began.append(now)
        rates = {
            "rollout": (sampled, seconds.get("seconds_rollout", 0.0)),
            "generate": (sampled, seconds.get("seconds_generate", 0.0)),
            "sandbox": (observed, seconds.get("seconds_sandbox", 0.0)),
            "train": (trained_tokens, seconds.get("seconds_train", 0.0)),
        }
        values = {**seconds, "tokens_rollout": sampled, "tokens_observed": observed}
        return values | {
            f"tokens_per_second_{n}": tokens / s for n, (tokens, s) in rates.items() if s >= SHORTEST
        }


def merge(intervals: Iterable[TimeSpan]) -> list[TimeSpan]:
    """The union of intervals, as disjoint ones in order."""
    union: list[TimeSpan] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def length(disjoint: Iterable[TimeSpan]) -> float:
    return sum(end - begin for begin, end in disjoint)


def _tools(run: Trajectory) -> Iterator[TimeSpan]:
    for turn in run.turns:
        for observation in turn.observations:
            yield observation.started, max(observation.started, observation.ended)


def _completions(run: Trajectory) -> Iterator[TimeSpan]:
    """The time from the start of each turn to its first tool call: sampling and parsing."""
    for turn in run.turns:
        first = min((o.started for o in turn.observations), default=turn.ended)
        yield turn.started, max(turn.started, first)


def learned_from(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Totals over the steps of a training from its metrics, and mean shares of the loss parts. Empty for a
    training without logs."""
    if not any("logged_runs" in row for row in rows):
        return {}
    total = {name: _sum(rows, name) for name in ("logged_runs", "fresh_runs", "tokens", "weight_dropped")}
    total["stale_tokens_dropped"] = _sum(rows, "stale_dropped")
    total["too_old"] = rows[-1].get("too_old") or 0.0
    total["log_left"] = rows[-1].get("log_left") or 0.0
    total["sft_tokens"], total["preference_pairs"] = _sum(rows, "sft_tokens"), _sum(rows, "preference_pairs")
    total["log_share"] = total["logged_runs"] / max(1.0, total["logged_runs"] + total["fresh_runs"])
    for name in ("share_policy", "share_kl", "share_sft", "share_preference", "ess_logged", "ess_kept"):
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values:
            total[name] = sum(values) / len(values)
    return total


def _sum(rows: Sequence[Mapping[str, float | None]], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


USED = "used.jsonl"
"""the file's name in the folder of a training"""


class UsedRuns:
    """The lines of the steps before `step`; lines of later steps, which were not saved, are dropped. Raises
    CheckpointError if a step of the saved state is missing in the file."""

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        lines = read_used(path)[:step] if path.exists() else []
        if [line["step"] for line in lines] != list(range(step)):
            raise CheckpointError(
                f"{path} does not hold the runs of the {step} steps that the saved state has learned from;"
                " put the file back, or start anew under another --name"
            )
        self.run_ids = [run for line in lines for group in line["groups"] for run in group["runs"]]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines), CheckpointError)

    def append(self, step: int, groups: Sequence[Group]) -> None:
        """Append one line and sync it. Raises CheckpointError if the disk is full."""
        entries = [{"task": g.task_key, "runs": [t.id for t in g.trajectories]} for g in groups]
        with full_disk_explained(self._path, CheckpointError), self._path.open("a") as file:
            file.write(json.dumps({"step": step, "groups": entries}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.run_ids += [run for group in entries for run in group["runs"]]


def read_used(path: Path) -> list[dict[str, Any]]:
    """The lines in order, without an incomplete last one."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


KEPT = 200
"""number of rows kept for sparklines and the estimate of the remaining time"""


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Watch:
    """What is called during a training."""

    on_step: Callable[[int, int, dict[str, float]], None] = _nothing
    """a step has ended: steps done, total steps, its metrics"""
    on_run: Callable[[Trajectory], None] = _nothing
    """a rollout of the current step has ended"""
    on_groups: Callable[[int, Sequence[Group], Sequence[Trajectory]], None] = _nothing
    """step, its groups and its control rollouts, before they are learned from"""
    enough: Callable[[], bool] = lambda: False
    """whether no further step shall be begun"""


@dataclass(frozen=True, slots=True)
class PanelLine:
    metric: str
    label: str
    form: str = ".4g"


LINES = {
    line.metric: line
    for line in (
        PanelLine("reward_mean", "reward", ".3f"),
        PanelLine(f"{SUCCESS}all", "success", ".1%"),
        PanelLine("frac_zero_std", "groups without signal", ".1%"),
        PanelLine("loss", "loss"),
        PanelLine("entropy", "entropy", ".3f"),
        PanelLine("grad_norm", "gradient norm"),
        PanelLine("ess", "effective samples", ".1%"),
        PanelLine("stale", "stale tokens", ".1%"),
    )
}
"""the metrics of a step's line, in this order"""


def open_view(
    name: str, total: int, rows: list[MetricsRow], *, console: Console | None = None
) -> TrainingView:
    """The first installed view that shows trainings here, else lines; on stderr unless a console is given.
    `rows`: metrics so far."""
    shown_on = console or Console(stderr=True)
    for kind, view in VIEWS.items():
        opened: TrainingView | None
        opened = call_extension(view.training, name, total, rows, shown_on, name=f"the view {kind}")
        if opened is not None:
            return opened
    return LinesView(name, total, rows)


def with_row(rows: list[MetricsRow], row: Mapping[str, float]) -> list[MetricsRow]:
    """The rows with the new one appended; rows of the same and later steps are replaced."""
    step = row.get("step", math.inf)
    latest: MetricsRow = dict(row)
    return [*(r for r in rows if (r.get("step") or 0) < step), latest][-KEPT:]


class LinesView(TrainingView):
    """One line per step on stderr, for logs and pipes."""

    def __init__(self, name: str, total: int, rows: list[MetricsRow]) -> None:
        self._name = name
        self._total = total
        self._rows = rows[-KEPT:]

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        self._rows = with_row(self._rows, row)
        shown = [
            f"{line.label.strip()} {written(line, row)}" for line in LINES.values() if line.metric in row
        ]
        left = seconds_left(self._rows, done, total)
        parts = [f"step {done}/{total}", *shown, f"left {duration(left or 0)}"]
        print("  ".join(parts), file=sys.stderr, flush=True)


class Sink(Protocol):
    """Takes the metrics of one step after another."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step. The first call may go back to a step that an earlier process wrote: where
        the library can, what was written from that step on is replaced."""

    def close(self) -> None: ...


SINKS: Extensions[Callable[[str, Path, Mapping[str, Any]], Sink]] = Extensions(
    "nano.sinks", check=lambda make: takes(make, "name", "folder", "settings")
)
"""(name and folder of the training, its settings) -> a sink"""


def open_sinks(names: Sequence[str], *, name: str, folder: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """A sink for each of `names`, opened before training begins. Raises UsageError for an unknown one, and
    for one that raises, and ConfigError where its library is missing."""
    made = {kind: SINKS.named("--log-to", kind) for kind in names}
    opened = []
    for kind, make in made.items():
        sink = call_extension(make, name, folder, settings, name=f"--log-to {kind}", error=UsageError)
        if not (callable(getattr(sink, "write", None)) and callable(getattr(sink, "close", None))):
            raise UsageError(
                f"--log-to {kind} made what is {described(sink)}; a sink has write(step, metrics) and close()"
            )
        opened.append(sink)
    return opened


class Watcher:
    """Shows a training, keeps its rollouts, and records how it ends as an event."""

    def __init__(self, folder: Path, view: TrainingView, sinks: Sequence[Sink], *, done: int) -> None:
        """`done` is the number of steps whose metrics are in the folder already."""
        self._folder = folder
        self._view = view
        self._sinks = sinks
        self._rollouts: RowWriter | None = None
        self._done = done
        self._failed: set[int] = set()
        self.last: dict[str, float] = {}
        """metrics of the last step in this process"""

    def on_run(self, run: Trajectory) -> None:
        self._view.run_done()

    def on_groups(self, step: int, groups: Sequence[Group], controls: Sequence[Trajectory]) -> None:
        # rows of that and later steps from a killed process are dropped
        self._rollouts = self._rollouts or RowWriter(self._folder / ROLLOUTS, resume_at=step)
        runs = [rollout_row(run) for group in groups for run in group.trajectories]
        runs += [rollout_row(run, control=True) for run in controls]
        self._rollouts.write_row({"step": step, "runs": runs})

    def on_step(self, done: int, total: int, values: dict[str, float]) -> None:
        self._done, self.last = done, dict(values)
        finite = {name: value for name, value in values.items() if math.isfinite(value) and name != "step"}
        for place, sink in enumerate(self._sinks):
            self._tell(place, sink.write, done - 1, finite)
        self._view.step_done(done, total, values)

    def _tell(self, place: int, method: Callable[..., None], *values: Any) -> None:
        """Call a sink; what it raises is said once, and the training goes on."""
        try:
            call_extension(method, *values, name=f"the sink {type(self._sinks[place]).__name__}")
        except NanoError as problem:
            if place not in self._failed:
                print(f"nano: {printable(str(problem))}; the training goes on", file=sys.stderr)
            self._failed.add(place)

    def __enter__(self) -> Self:
        note(self._folder, EventKind.RESUMED if self._done else EventKind.STARTED, self._done)
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)
        if self._rollouts:
            self._rollouts.close()
        for place, sink in enumerate(self._sinks):
            self._tell(place, sink.close)
        if isinstance(error, GuardTripped):
            note(self._folder, EventKind.GUARD, self._done, str(error))
        elif error is not None:
            note(self._folder, EventKind.STOPPED, self._done, str(error) or type(error).__name__)
        else:
            note(self._folder, EventKind.FINISHED, self._done)


def written(line: PanelLine, row: Mapping[str, float | None]) -> str:
    value = row.get(line.metric)
    return "-" if value is None else format(value, line.form)


def seconds_of(row: Mapping[str, float | None]) -> float:
    """Wall clock seconds of a step: the sum of its phases."""
    return sum(row.get(f"seconds_{phase}") or 0.0 for phase in ("rollout", "train", "save"))


def seconds_left(rows: list[MetricsRow], done: int, total: int) -> float | None:
    """Estimated from the median of the last ten steps; None before the first step."""
    recent = [seconds_of(row) for row in rows[-10:]]
    return median(recent) * (total - done) if recent else None


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_SHOWN = (
    "reward_mean", "frac_zero_std", "log_share", "age_mean", "ess_kept", "loss",
    "entropy", "approx_kl", "clip_low", "clip_high", "ess",
    "mismatch", "grad_norm", "tokens", "tokens_per_second", "seconds_rollout", "seconds_train",
)  # fmt: skip


def print_metrics(rows: list[dict[str, float | None]], console: Console | None = None) -> None:
    """How a training went: each metric in its first and last step, and its mean over all; on stderr, or to
    the console given."""
    if not rows:
        return
    from rich.table import Table

    table = Table("metric", "first step", "last step", "mean", box=None, title=f"{len(rows)} steps")
    for name in _SHOWN:
        values = [value for row in rows if (value := row.get(name)) is not None]
        if values:
            mean = sum(values) / len(values)
            table.add_row(name, *(f"{value:.4g}" for value in (values[0], values[-1], mean)))
    (console or Console(stderr=True)).print(table)
