"""`nano-coder memory`: the notes that agents keep about a project."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.options import Log
from nano_coder.commands.run import open_editor
from nano_coder.config import load_config, note_scrub, open_store
from nano_shared.agent_notes import Note, Notes
from nano_shared.command_line import JsonOption, emit, lazy_app
from nano_shared.errors import UsageError
from nano_shared.printable import one_line, printable

command = lazy_app(
    "nano-coder.memory",
    {
        "list": (f"{__name__}:list_notes", "The notes about a project."),
        "edit": (f"{__name__}:edit", "Give a note another text."),
        "forget": (f"{__name__}:forget", "Delete notes."),
    },
    help="What agents remember of a project.",
)
ProjectOption = Annotated[Path, Option("-C", metavar="DIR", help="The project's directory.")]
AllProjects = Annotated[bool, Option("--all-projects", help="Those of every project in the log.")]


def list_notes(
    query: Annotated[str, Argument(help="Words that the notes hold; all notes without.")] = "",
    directory: ProjectOption = Path(),
    all_projects: AllProjects = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """The notes about a project, newest first, or those that hold the words of QUERY, best first.

    An agent writes notes with the tool remember, and reads them with recall (run --tool remember --tool
    recall).
    """
    found = _notes(directory, log, all_projects).all(query)
    emit(found, as_json, lambda: _show(found, all_projects))
    return 0


def _show(notes: Sequence[Note], all_projects: bool) -> None:
    for note in notes:
        when = datetime.fromtimestamp(note.created).strftime("%Y-%m-%d %H:%M")
        where = f"  {note.project}" if all_projects else ""
        private = "  (of its run alone)" if note.private else ""
        print(printable(f"{note.id:>5}  {when}  run {note.run_id}, turn {note.turn + 1}{where}{private}"))
        print(printable(f"       {note.text}".replace("\n", "\n       ")))
    if not notes:
        print("no notes", file=sys.stderr)


def edit(
    note: Annotated[int, Argument(max=2**63 - 1, help="The note's number.")],
    text: Annotated[str | None, Argument(help="Its new text; your editor opens without.")] = None,
    log: Log = None,
) -> int:
    """Give a note another text, without secrets as any note."""
    notes = _notes(Path(), log, everywhere=True)
    if text is None:
        before = next((each.text for each in notes.all() if each.id == note), None)
        if before is None:
            raise UsageError(f"no note {note}; nano-coder memory list shows those there are")
        with tempfile.TemporaryDirectory(prefix="nano-note-") as folder:
            (Path(folder) / "note.txt").write_text(before, encoding="utf-8")
            open_editor(["note.txt"], Path(folder))
            text = (Path(folder) / "note.txt").read_text(encoding="utf-8", errors="replace")
        if text.strip() == before:
            print("not changed", file=sys.stderr)
            return 0
    print(printable(f"note {note}: {one_line(notes.edit(note, text).text, 200)}"))
    return 0


def forget(
    note: Annotated[list[int] | None, Argument(max=2**63 - 1, help="Numbers of notes.")] = None,
    everything: Annotated[bool, Option("--all", help="All notes about the project.")] = False,
    directory: ProjectOption = Path(),
    log: Log = None,
) -> int:
    """Delete notes by number, or all about a project. What runs read of them stays in the log."""
    if everything == bool(note):
        raise UsageError("name the notes by their numbers, or say --all")
    known = _notes(directory, log, everywhere=not everything)
    if missing := set(note or ()) - {each.id for each in known.all()}:
        raise UsageError(f"no note {min(missing)}; nano-coder memory list shows those there are")
    number = known.forget(note)
    print(f"{number} note{'' if number == 1 else 's'} forgotten")
    return 0


def _notes(directory: Path, log: str | None, everywhere: bool = False) -> Notes:
    config, _ = load_config({"log": log}, directory)
    store = open_store(config, create=False)
    project = None if everywhere else str(directory.resolve())
    return store.notes(project, note_scrub(config))
