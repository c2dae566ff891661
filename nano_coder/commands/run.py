"""`nano-coder run`: one task in a sandboxed copy of a directory, each step shown, the diff at the end, and on
a terminal the question what is to become of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Argument, Option

from nano_coder.commands.changes import apply_to
from nano_coder.commands.display import Display, cost_of, exit_code, on_terminal, summary
from nano_coder.commands.options import (
    DirectoryOption,
    Setup,
    Verbose,
    agent_options,
    history_of,
    in_place_of,
    instructions_of,
    open_runtime,
)
from nano_coder.config import ASKED, SPREADING, UNTRUSTED_CHECK, open_store, task_limits
from nano_coder.run.execution import Runtime, Stop, attempt_task, escalate_run, passed, refuse_unpriced
from nano_coder.run.tries import best_of, run_tries
from nano_coder.sandbox.jail_request import say_unread
from nano_coder.tools.tool import load_image
from nano_shared import snapshot, snapshot_change
from nano_shared.checkpoint import latest_checkpoint
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import NanoError, UsageError
from nano_shared.extension_points import is_hosted, is_reference, leave_hanging_calls
from nano_shared.files import content_hash, nano_home
from nano_shared.logged_run import Feedback, FeedbackKind, edited_workspace, workspace_edit
from nano_shared.owners import project_id
from nano_shared.printable import printable
from nano_shared.snapshot import EntryKind, make_snapshot, save
from nano_shared.store import LogStore
from nano_shared.types import ImageRef, Task, Trajectory

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedPolicy


@agent_options(
    "model", "base_url", "profile", "device", "check", "tries", "escalate", "escalate_from", "max_cost",
    "temperature", "sandbox", "image", "net", "python", "log",
)  # fmt: skip
def command(
    task: Annotated[str, Argument(metavar="TASK", help="Text, or - for standard input.")],
    setup: Setup,
    directory: DirectoryOption = Path(),
    seed: Annotated[int | None, Option(help="Seed of the sampling.")] = None,
    apply_changes: Annotated[
        bool, Option("--apply", help="Apply the changes when the run is done.")
    ] = False,
    reflect: Annotated[
        int,
        Option(
            metavar="[N]", min=0, show_default=False,
            help="After a failed check, N more attempts (1) that read the diff and the check's output.",
        ),
    ] = 0,
    images: Annotated[
        list[Path] | None,
        Option("--image", metavar="FILE", help="Shown with TASK to a model that sees; repeatable."),
    ] = None,
    verbose: Verbose = False,
    as_json: JsonOption = False,
) -> int:  # fmt: skip
    """Run TASK (text, or - for standard input) in a sandboxed copy of a directory.

    DIR itself is not touched unless the changes are applied: with --apply, when you accept them at the end
    (as they are, or edited in $VISUAL or $EDITOR), or later with `nano-coder apply RUN`. What you answer on
    a terminal is kept as feedback on the run. With --tries it is the winner that is shown and applied: of
    the runs that passed the check, the one with the shortest diff. They are sampled at 0.7, unless set. With
    --escalate the hosted model gets the task where they all failed, and its run is the winner if it passes.
    """
    try:
        prompt = (sys.stdin.buffer.read() if task == "-" else os.fsencode(task)).decode()
    except UnicodeDecodeError as undecoded:
        raise UsageError(f"the task is not UTF-8 text ({undecoded})") from None
    if not prompt.strip():
        raise UsageError(
            "the task is empty; say what to do, for example: nano-coder run 'fix the failing test'"
        )
    if reflect and not setup.config.check:
        raise UsageError("--reflect needs a --check: without one no attempt fails")
    hosted = _open_hosted(setup)
    config = setup.config  # before the temperature that tries need, which is not the hosted model's
    setup = _with_tries(with_advice(setup), reflect)
    store = open_store(setup.config, directory)
    shown = tuple(load_image(path, store) for path in images or ())
    start = take_snapshot(setup, store)
    display = Display(quiet=as_json, verbose=verbose, base_url=setup.config.base_url)
    runtime = open_work(setup, store)
    work = make_task(prompt, start, setup, runtime, shown)
    if setup.config.tries > 1:
        result = _try(work, runtime, setup.config.tries, seed, display)
    else:  # each of the attempts sees why the one before failed
        with display.naming_the_run():
            hooked = replace(runtime, hooks=display.hooks())
            attempts = attempt_task(work, hooked, reflect=reflect, seed=seed)
        tried = {"attempts": [{"run": one.id, "reward": one.reward} for one in attempts]} if reflect else {}
        result = _Result(attempts[-1], tried, exit_code(attempts[-1]))
    failed = result.exit_code != INTERRUPTED and result.run.reward is not None and not passed(result.run)
    if hosted is not None and failed:
        result = _escalate(result, in_place_of(runtime, hosted, config), config.escalate_from, display)
    trajectory, several = result.run, setup.config.tries > 1 or hosted is not None
    apply_now = apply_changes and (passed(trajectory) or not several)
    accepted = trajectory.last_snapshot if apply_now else None
    if trajectory.diff and not apply_changes and not as_json and on_terminal():
        display.diff(trajectory)
        try:
            accepted = review(trajectory, directory, runtime.store)
        except typer.Abort:
            display.end(trajectory, applied=False)  # which says how the changes are had later
            raise
    applied, problem = False, result.problem
    if trajectory.diff and accepted is not None:
        try:
            apply_to(trajectory, directory, store, accepted)
            applied = True
        except KeyboardInterrupt as caught:
            problem = caught
        except (NanoError, OSError) as caught:
            message = str(caught) if isinstance(caught, NanoError) else f"not applied: {caught}"
            again = (
                f"nano-coder apply {trajectory.id} -C {shlex.quote(str(trajectory.directory))} tries again"
            )
            problem = UsageError(f"{message.rstrip('.')}; {again}")
    told = summary(trajectory, applied=applied) | result.told | {"exit_code": result.exit_code}
    emit(told, as_json, lambda: display.end(trajectory, applied=applied))
    if problem is not None:  # raised after the result is printed
        raise problem
    return result.exit_code


INTERRUPTED = 130
"""exit code after Ctrl-C"""


class _Result(NamedTuple):
    run: Trajectory
    """the one that is shown and applied"""
    told: dict[str, Any]
    """what `--json` says of all"""
    exit_code: int
    problem: BaseException | None = None
    """of the escalation, raised after the result is printed"""


def _refuse_asked(setup: Setup, setting: str, why: str) -> None:
    """Raises UsageError for what this command asks for and cannot have; what only a file sets is left out."""
    if setup.sources[setting] in ASKED:
        raise UsageError(why)


def _open_hosted(setup: Setup) -> OpenedPolicy | None:
    """The model to escalate to; None without one. Raises UsageError and ConfigError before anything is done;
    what only a file sets does not hold for runs that cannot be escalated."""
    from nano_coder.models.opening import open_policy

    config = setup.config
    if (name := config.escalate) is None:
        return None
    why = None
    if not config.check:
        why = "--escalate needs a --check, which says whether the local model failed"
    elif config.model == name:
        why = f"--escalate {name}: it is the model that runs the task anyway; name another one"
    elif is_hosted(config.model):
        why = f"--escalate {name} comes after a local model, and --model {config.model} is hosted"
    if why is not None:
        _refuse_asked(setup, "escalate", why)
        return None
    if not is_hosted(name) and not is_reference(name):
        raise UsageError(f"--escalate {name}: name a hosted model, as openai:NAME")
    opened = open_policy(name, config, own_temperature=config.temperature is None)
    refuse_unpriced(opened.policy, config.max_cost)
    return opened


def _escalate(local: _Result, runtime: Runtime, begins: str, display: Display) -> _Result:
    """The hosted model's run if it passed, else the local result."""
    stop = Stop()
    runtime = replace(runtime, hooks=replace(display.hooks(), stop=stop))
    with _interrupting(stop) as interrupts:
        try:
            run = escalate_run(local.run, runtime, from_best=begins == "best")
        except NanoError as problem:  # a refused key: what the local model did is printed first
            return local._replace(problem=problem)
    display.escalated(run)
    of_run = {
        "run": run.id, "parent": run.parent, "model": run.policy, "reward": run.reward, "stop": run.stop,
        "stop_detail": run.stop_detail, "cost": cost_of(run),
    }  # fmt: skip
    told = {**local.told, "winner": run.id if passed(run) else None, "escalation": of_run}
    if passed(run):
        return _Result(run, told, exit_code(run))
    return local._replace(told=told, exit_code=INTERRUPTED if interrupts else local.exit_code)


def with_advice(setup: Setup) -> Setup:
    """The setup with the profile in which a model of the catalogue works under a check, unless one is named,
    or with the checkpoint that a package brings for it. Without a promoted checkpoint or a model's name such
    a model, if it was fetched, goes before the shipped policy; a terminal is told once of one that was
    not."""
    from nano_coder.config import catalogue
    from nano_coder.models.catalogue import fetched
    from nano_coder.models.opening import CHECKPOINTS

    config = setup.config
    if not config.check or config.profile or config.base_url:
        return setup
    advised = [name for name, entry in catalogue().items() if entry.checked_profile]
    name = config.model
    promoted = latest_checkpoint(project_id(setup.directory)) or latest_checkpoint()
    if name is None and advised and promoted is None:
        name = next(filter(fetched, advised), None)
        told = nano_home() / "told" / advised[0]
        if name is None and sys.stderr.isatty() and not told.exists():
            hint = f"nano: nano-coder models get {advised[0]} brings a model that repairs under a check"
            print(hint, file=sys.stderr)
            with contextlib.suppress(OSError):
                told.parent.mkdir(parents=True, exist_ok=True)
                told.touch()
    if name not in advised:
        return setup
    entry = catalogue()[name]
    if fetched(name) and entry.checked_policy in CHECKPOINTS:
        advice = {"model": entry.checked_policy}
    else:
        advice = {"model": name, "profile": entry.checked_profile}
    return setup._replace(config=config.model_copy(update=advice))


def _with_tries(setup: Setup, reflect: int) -> Setup:
    """The setup as its tries need it. Raises UsageError where they cannot be made; those that only a file
    sets are one then, as they are of a hosted model."""

    config, count = setup.config, setup.config.tries
    if count == 1:
        return setup
    why = None
    if not config.check:
        why = f"--tries {count} needs a --check, which says which of the runs has done the task"
    elif reflect:
        why = "--tries makes attempts side by side, and --reflect one after another: leave out one of the two"
    elif config.temperature == 0:
        why = f"temperature 0 makes {count} equal runs: leave --temperature out, which is {SPREADING} then"
    if why is not None:
        _refuse_asked(setup, "tries", why)
    if why or (is_hosted(config.model) and setup.sources["tries"] not in ASKED):
        return setup._replace(config=config.model_copy(update={"tries": 1}))
    spread = SPREADING if config.temperature is None else config.temperature
    return setup._replace(config=config.model_copy(update={"temperature": spread}))


def _try(task: Task, runtime: Runtime, count: int, seed: int | None, display: Display) -> _Result:
    """The winner of `count` tries, or the best that failed."""
    stop = Stop()
    with _interrupting(stop) as interrupts:
        runs = run_tries(task, runtime, count, stop, seed=seed, on_end=partial(display.tried, count))
    if not runs:
        raise typer.Abort
    best = best_of(runs)
    tries = [{"run": run.id, "reward": run.reward, "stop": run.stop} for run in runs]
    told = {"winner": best.id if passed(best) else None, "tries": tries}
    return _Result(best, told, INTERRUPTED if interrupts and not passed(best) else exit_code(best))


@contextlib.contextmanager
def _interrupting(stop: Stop) -> Iterator[list[int]]:
    """Within the block Ctrl-C or SIGTERM sets `stop`, and the second one ends the process: a check may take
    minutes. Yields the signals that came."""
    came: list[int] = []

    def handle(number: int, frame: object) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)
        leave_hanging_calls(number)
        stop.set()

    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if ours}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handle)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_work(setup: Setup, store: LogStore) -> Runtime:
    """The runtime of runs in the directory, which they see with its history."""
    runtime = open_runtime(setup.config, setup.directory, store)
    directory = str(setup.directory.resolve())
    project = replace(runtime.project, directory=directory, history=history_of(setup.directory, setup.config))
    return replace(runtime, project=project)


def take_snapshot(setup: Setup, store: LogStore) -> str:
    """The id of the directory as it is now, without what no run sees."""
    left_out, unread = (*snapshot.DEFAULT_EXCLUDES, *setup.config.exclude), list[str]()
    start = snapshot.snapshot_directory(
        setup.directory, store.blobs, left_out, max_bytes=setup.config.workspace_mb << 20,
        unread=unread.append,
    )  # fmt: skip
    say_unread(setup.directory, sorted(unread))
    return start


def make_task(
    prompt: str, start: str, setup: Setup, runtime: Runtime, images: tuple[ImageRef, ...] = ()
) -> Task:
    """An ad-hoc task on a snapshot of the directory; its key is the hash of prompt, snapshot, check and
    images."""
    config, check = setup.config, setup.config.check or None
    key = content_hash([prompt, start, check, *(image.blob for image in images)])
    return Task(
        key=key, prompt=prompt, snapshot=start, check=check, images=images,
        check_trusted=setup.sources.get("check") != UNTRUSTED_CHECK, image=config.image,
        instructions=instructions_of(setup.directory, config, runtime.profile), limits=task_limits(config),
    )  # fmt: skip


QUESTION = "[a]ccept and apply, [e]dit first, [r]eject, or Enter to decide later"
_WORDS = {
    FeedbackKind.ACCEPT: ("a", "accept", "y", "yes"),
    FeedbackKind.EDIT: ("e", "edit"),
    FeedbackKind.REJECT: ("r", "reject", "n", "no"),
}
_ANSWERS = {word: kind for kind, words in _WORDS.items() for word in words}


def review(trajectory: Trajectory, directory: Path, store: LogStore) -> str | None:
    """Ask what is to become of a run's changes and log the answer as feedback.

    Returns the workspace to apply to `directory`: the run's own, or as the user edited it; None to apply
    nothing. Raises typer.Abort at an end of input or an interrupt.
    """
    print(f"changes to {printable(str(directory))}", file=sys.stderr)
    while True:
        answer = typer.prompt(QUESTION, default="", show_default=False, err=True).strip().lower()
        if not answer:
            return None
        kind = _ANSWERS.get(answer)
        if kind is FeedbackKind.EDIT:
            try:
                edit = edited(trajectory, store)
            except UsageError as problem:
                print(f"not edited: {problem}", file=sys.stderr)
                continue
            store.add_feedback(trajectory.id, Feedback(kind=kind, text=edit, created=time.time()))
            return edited_workspace(Feedback(kind=kind, text=edit, created=0.0))
        if kind is not None:
            store.add_feedback(trajectory.id, Feedback(kind=kind, created=time.time()))
            return trajectory.last_snapshot if kind is FeedbackKind.ACCEPT else None
        print(f"{answer!r} is none of the answers", file=sys.stderr)


def edited(trajectory: Trajectory, store: LogStore) -> str:
    """Open the changed files in the user's editor; the text of the EDIT row (`workspace_edit`).

    The editor works on a private copy of the workspace, and only the files it was opened on count, so that
    what it leaves beside them does not. Raises UsageError where there is nothing to open, the editor fails,
    or nothing was changed.
    """
    before, after = trajectory.snapshot, trajectory.last_snapshot
    assert before is not None  # a run with a diff has both
    assert after is not None
    left = snapshot.load(after, store.blobs)
    changed = snapshot.changed_paths(snapshot.load(before, store.blobs), left)
    paths = [p for p in changed if p in left.by_path and left.by_path[p].kind is EntryKind.FILE]
    if not paths:
        raise UsageError("the run only took files away, so there is no text to edit; accept or reject it")
    with tempfile.TemporaryDirectory(prefix="nano-edit-") as folder:
        work = Path(folder) / "work"
        snapshot.materialise(left, store.blobs, work)
        open_editor(paths, work)
        now = snapshot.load(snapshot.snapshot_directory(work, store.blobs, exclude=()), store.blobs)
    kept = [entry for entry in left.entries if entry.path not in paths]
    opened = [now.by_path[path] for path in paths if path in now.by_path]
    workspace = save(make_snapshot([*kept, *opened]), store.blobs)
    diff = snapshot_change.diff(after, workspace, store.blobs)
    if not diff:
        raise UsageError("the editor changed nothing; accept the changes as they are, or reject them")
    return workspace_edit(workspace, diff)


def open_editor(paths: list[str], work: Path) -> None:
    """Open files of a folder in the user's editor. Raises UsageError where it cannot be started or fails."""
    line = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        # names of files are data: one that begins with a dash is no option
        done = subprocess.run([*shlex.split(line), *(f"./{path}" for path in paths)], cwd=work, check=False)
    except (OSError, ValueError) as problem:
        raise UsageError(f"cannot start the editor {line!r} ({problem}); set VISUAL or EDITOR") from None
    if done.returncode != 0:
        raise UsageError(f"the editor {line!r} ended with status {done.returncode}")
