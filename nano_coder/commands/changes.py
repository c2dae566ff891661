"""`nano-coder apply`, `diff`, `undo`, `restore`: what a run changed, and what becomes of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from nano_coder.agent.actions import workspace_after, workspaces_since
from nano_coder.commands.display import on_terminal
from nano_coder.commands.options import DirectoryOption, Log, RunArgument, open_log
from nano_shared import snapshot, snapshot_change
from nano_shared.errors import UsageError
from nano_shared.logged_run import edited_workspace
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


def apply(
    run: RunArgument,
    directory: Annotated[
        Path | None, Option("-C", metavar="DIR", help="Where to apply, if not where the run was made.")
    ] = None,
    log: Log = None,
) -> int:
    """Apply what RUN changed to the directory that it was made in.

    That of another owner's run has to be named with -C, or confirmed on a terminal. Stops with the list of
    files that changed since, touching none.
    """
    store = open_log(log, directory or Path())
    trajectory = store.get(run)
    place = directory_of(trajectory, directory, store)
    return _told(apply_to(trajectory, place, store), place, "apply", None if directory else "applied to")


def _told(changed: Sequence[str], place: Path, verb: str, done: str | None) -> int:
    """Say which files were changed, and where, if the user did not say it."""
    for path in changed:
        print(printable(path))
    if not changed:
        print(f"nothing to {verb} in {printable(str(place))}", file=sys.stderr)
    elif done is not None:
        print(f"{done} {printable(str(place))}", file=sys.stderr)
    return 0


def directory_of(trajectory: Trajectory, given: Path | None, store: LogStore) -> Path:
    """The directory that a run is of, or the one that the user names. Raises UsageError without one, and for
    that of another owner's run where the user does not consent on a terminal."""
    if given is not None:
        return given
    if trajectory.directory is None:
        raise UsageError(f"the log names no directory for run {trajectory.id}; name one with -C")
    if not Path(trajectory.directory).is_dir():
        raise UsageError(
            f"run {trajectory.id} was made in {trajectory.directory}, which is no directory any more; "
            "name another with -C"
        )
    if store.user is not None and not store.user.owns(trajectory.owner):
        whose = f"run {trajectory.id} is of {trajectory.owner}, who made it in {trajectory.directory}"
        if not on_terminal():
            raise UsageError(f"{whose}; name a directory with -C")
        typer.confirm(printable(f"{whose}. Go on there?"), abort=True, err=True)
    return Path(trajectory.directory)


def apply_to(
    trajectory: Trajectory, directory: Path, store: LogStore, workspace: str | None = None
) -> list[str]:
    """Apply what a run changed to a directory, or nothing at all where a file changed since (Conflict).

    Where the changes of the run that it continues are applied already, the rest of them is. `workspace` is
    what the run left as somebody edited it; None is what it left.
    """
    after = workspace or trajectory.last_snapshot
    if trajectory.snapshot is None or after is None:
        return []
    conflict: snapshot.Conflict | None = None
    for before in dict.fromkeys((trajectory.snapshot, workspace_after(trajectory, trajectory.inherited))):
        try:
            return list(snapshot_change.apply(before, after, store.blobs, directory))
        except snapshot.Conflict as found:
            conflict = conflict or found
    assert conflict is not None
    raise conflict


def diff(
    run: RunArgument,
    step: Annotated[
        int | None,
        Option("--at", metavar="STEP", help="As it was after this step, as `log show` counts them."),
    ] = None,
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Print the unified diff of RUN against the workspace it started from.

    Into a pipe or a file it is a patch that `git apply` takes, binary files included.
    """
    store = open_log(log, directory)
    trajectory = store.get(run)
    text, shown = trajectory.diff, sys.stdout.isatty()
    named = any(line.startswith(("Binary files ", "Large files ")) for line in text.splitlines())
    # a run that was killed left steps, but no diff; a kept diff only names files that are no text
    if step is not None or (trajectory.snapshot and (trajectory.stop is None or (named and not shown))):
        start, then = (workspace_after(trajectory, at) for at in (0, step))
        text = snapshot_change.diff(start, then, store.blobs, whole=not shown)
    if trajectory.directory is not None:
        print(f"changes to {printable(trajectory.directory)}", file=sys.stderr)
    if shown:
        print(printable(text, None), end="")
    else:  # a pipe gets it exactly, for `git apply`
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    return 0


def undo(
    run: RunArgument,
    step: Annotated[
        int,
        Option(
            "--to",
            metavar="STEP",
            help="Take back only what came after this step, as `log show` counts them.",
        ),
    ] = 0,
    directory: Annotated[
        Path | None, Option("-C", metavar="DIR", help="Where it was applied, if not where the run was made.")
    ] = None,
    log: Log = None,
) -> int:
    """Take back what applying RUN did, in the directory that it was made in.

    Stops with the list of files that changed since, touching none. Files that the run did not change are left
    as they are, and so is a folder of the run's that holds some.
    """
    store = open_log(log, directory or Path())
    trajectory = store.get(run)
    place = directory_of(trajectory, directory, store)
    target = workspace_after(trajectory, step)
    edits = (edited_workspace(row) for row in reversed(store.feedback(trajectory.id)))
    stages = [*filter(None, edits), *workspaces_since(trajectory, step)]
    changed = snapshot_change.undo(stages, target, store.blobs, place)
    return _told(changed, place, "undo", None if directory else "taken back in")


def restore(
    run: RunArgument,
    step: Annotated[int, Option("--at", metavar="STEP", help="As `log show` counts them; 0 is the start.")],
    target: Annotated[
        Path, Option("--to", metavar="DIR", help="Where to write it: a directory that is new or empty.")
    ],
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Write the workspace as it was after STEP of RUN to DIR. Version control and caches are in no log."""
    store = open_log(log, directory)
    workspace = workspace_after(store.get(run), step)
    if target.is_symlink() or target.exists():
        if not target.is_dir():
            raise UsageError(f"{target} is not a directory; --to names a new or empty one")
        if any(target.iterdir()):
            raise UsageError(f"{target} is not empty; --to names a new or empty directory")
    snapshot.materialise(workspace, store.blobs, target)
    return 0
