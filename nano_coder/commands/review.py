"""The question at the end of a run on a terminal: accept, edit or reject what the agent did."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer

from nano_shared import snapshot, snapshot_change
from nano_shared.errors import UsageError
from nano_shared.logged_run import Feedback, FeedbackKind, edited_workspace, workspace_edit
from nano_shared.printable import printable
from nano_shared.snapshot import EntryKind, make_snapshot, save
from nano_shared.store import LogStore
from nano_shared.types import Trajectory

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
