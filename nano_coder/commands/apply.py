"""`nano-coder apply`: apply a run's changes, or nothing at all where something changed since."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from nano_coder.agent.workspace import workspace_after
from nano_coder.commands.options import Log, RunArgument, open_log
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Trajectory


def command(
    run: RunArgument,
    directory: Annotated[
        Path | None, Option("-C", metavar="DIR", help="Where to apply, if not where the run was made.")
    ] = None,
    log: Log = None,
) -> int:
    """Apply what RUN changed to the directory that it was made in.

    Stops with the list of files that changed since, touching none.
    """
    store = open_log(log, directory or Path())
    trajectory = store.get(run)
    place = directory_of(trajectory, directory)
    changed = apply_to(trajectory, place, store)
    for path in changed:
        print(printable(path))
    if not changed:
        print(f"nothing to apply in {printable(str(place))}", file=sys.stderr)
    elif directory is None:
        print(f"applied to {printable(str(place))}", file=sys.stderr)
    return 0


def directory_of(trajectory: Trajectory, given: Path | None) -> Path:
    """The directory that a run is of, or the one that the user names. Raises UsageError without one."""
    if given is not None:
        return given
    if trajectory.directory is None:
        raise UsageError(f"the log names no directory for run {trajectory.id}; name one with -C")
    if not Path(trajectory.directory).is_dir():
        raise UsageError(
            f"run {trajectory.id} was made in {trajectory.directory}, which is no directory any more; "
            "name another with -C"
        )
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
            return list(snapshot.apply(before, after, store.blobs, directory))
        except snapshot.Conflict as found:
            conflict = conflict or found
    assert conflict is not None
    raise conflict
