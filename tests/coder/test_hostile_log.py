"""Every command over a log of hostile texts: nothing that it prints drives a terminal, or is markup."""

from __future__ import annotations

import io
import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import typer
from executions import a_runtime, a_task, act

from nano_coder.cli import cli as coder
from nano_coder.run.execution import run_task
from nano_rl.cli import cli as rl
from nano_shared.command_line import run_command
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.printable import printable
from nano_shared.store import LogStore
from nano_shared.types import Tampering, ToolCall, Trajectory, Trust, Verdict

HOSTILE = (
    "[bold]b[/bold][link=http://x]l[/link][/] :smile: \x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\ \x9b31m"
    " \r\b\x7f\x00 \u202eevil\u2066 z\u200bw\ufeff \ud800 \U000e0001 \u2028"
)


def text(label: str) -> str:
    return f"{label} {HOSTILE}"


def hostile(run: Trajectory) -> Trajectory:
    """The run with every text of its own replaced that the log takes as it is."""
    (turn, *_) = run.turns
    seen = turn.observations[0].model_copy(
        update={"text": text("seen"), "files_changed": (text("file"),), "tool": text("tool")}
    )
    turn = turn.model_copy(
        update={
            "completion": turn.completion.model_copy(
                update={"text": text("said"), "policy_id": text("weights"), "tokens": None}
            ),
            "thought": text("thought"), "parse_error": text("wrong"),
            "calls": (ToolCall(name=text("call"), arguments={text("key"): text("value")}),),
            "observations": (seen,), "repairs": (text("repair"),),
        }
    )  # fmt: skip
    task = run.task.model_copy(
        update={
            "key": text("key"),
            "prompt": text("prompt"),
            "check": text("check"),
            "family": text("family"),
        }
    )
    verdict = Verdict(
        reward=0.0, trust=Trust.NONE, grader=text("grader"), graded_hash="x",
        checks={text("check"): text("fail")}, components={text("part"): 0.5}, failure_kind=text("kind"),
        tampering=(Tampering(kind=text("kind"), detail=text("detail")),),
    )  # fmt: skip
    return run.model_copy(
        update={
            "id": run.id + "z", "started": run.started + 1, "task": task, "turns": (turn,),  # the last one
            "stop_detail": text("why"),
            "answer": text("answer"), "diff": text("diff"), "policy": text("policy"), "verdict": verdict,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    name = "n[bold]\x1b[2J\u202e"
    runtime = a_runtime(folder, [act("write_file", path=name, content=f"{HOSTILE[:20]}\n"), act("submit")])
    with runtime.store as store:
        run = run_task(a_task(files={"a.py": "one\n"}), runtime)
        store.append(hostile(run))
        for kind in (FeedbackKind.NOTE, FeedbackKind.ACCEPT):
            said = text("note") if kind is FeedbackKind.NOTE else None
            store.add_feedback(run.id, Feedback(kind=kind, text=said, author=text("author"), created=1.0))
    return folder


Said = Any


@pytest.fixture
def said(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("NANO_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.chdir(tmp_path)

    def run(program: typer.Typer, *arguments: str) -> tuple[str, str]:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            with pytest.raises(SystemExit):
                run_command(program, list(arguments))
            sys.stdout.flush()
            sys.stderr.flush()
            told = [stream.buffer.getvalue().decode() for stream in streams]  # type: ignore[attr-defined]
        return told[0], told[1]

    return run


def driving(shown: str) -> set[str]:
    hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {c for c in shown if c not in "\n\t" and unicodedata.category(c) in hidden}


COMMANDS = [
    (coder, "log list"),
    (coder, "log list --json"),
    (coder, "log show RUN"),
    (coder, "log show RUN --json"),
    (coder, "log verify RUN"),
    (coder, "log verify"),
    (coder, "log export --format jsonl"),
    (coder, "log export --format messages"),
    (coder, "log export --format atif -o out"),
    (coder, "feedback --list"),
    (coder, "feedback --list --json"),
    (coder, "restore FIRST --at 1 --to copy"),
    (coder, "apply FIRST -C ."),
    (coder, "apply RUN -C ."),
    (coder, "undo RUN -C ."),
    (coder, "undo FIRST -C ."),
    (coder, "resume RUN"),
    (coder, "fork RUN --at 0"),
    (coder, "diff HOSTILE"),
    (coder, "config show"),
    (rl, "admit --model MODEL"),
    (rl, "admit --json --model MODEL"),
    (rl, "tasks from-log RUN"),
    (rl, "tasks from-log RUN --json"),
    (rl, "tasks from-log RUN --out theirs.jsonl"),
    (rl, "grade RUN"),
    (rl, "grade RUN --json"),
    (rl, "grade HOSTILE"),
    (rl, "export --format tokens --baseline none"),
    (rl, "checkpoints list"),
    (rl, "report HOSTILE"),
    (rl, "eval --tasks HOSTILE"),
]


@pytest.mark.some(6)
@pytest.mark.parametrize(("program", "line"), COMMANDS, ids=[line for _, line in COMMANDS])
def test_nothing_that_is_printed_drives_a_terminal(
    said: Said, home: Path, tiny_folder: Path, program: typer.Typer, line: str
) -> None:
    with LogStore.open(home / "log.db") as store:
        ids = [run.id for run in store.runs()]
    first, second = sorted(ids, key=len)  # the hostile one has the longer id
    names = {"RUN": second, "FIRST": first, "MODEL": str(tiny_folder)}
    names["HOSTILE"] = HOSTILE.replace("\0", "").replace("\ud800", "\udcff")
    out, err = said(program, *(names.get(part, part) for part in line.split()))
    assert driving(out) == set()
    assert driving(err) == set()
    assert "Traceback" not in err
    if "--json" in line and out:
        for row in out.splitlines():
            json.loads(row)


def test_brackets_are_shown_as_they_are(said: Said, home: Path) -> None:
    with LogStore.open(home / "log.db") as store:
        newest = store.resolve("last")
    out, err = said(coder, "log", "show", newest)
    assert "[bold]b[/bold][link=http://x]l[/link][/] :smile:" in out + err


def test_a_task_file_of_a_stranger_is_shown_as_it_is(said: Said, tmp_path: Path) -> None:
    task = a_task(key=text("key"), prompt=text("prompt"), family=text("family"), files={"a.py": HOSTILE})
    (tmp_path / "theirs.jsonl").write_bytes(
        json.dumps(task.model_dump(mode="python"), default=str).encode("utf-8", "surrogatepass") + b"\n"
    )
    for line in ("tasks list theirs.jsonl", "tasks check theirs.jsonl --out o.jsonl"):
        out, err = said(rl, *line.split())
        assert driving(out + err) == set()


def test_what_is_written_out_is_json_all_the_same() -> None:
    shown = printable(json.dumps({"a": HOSTILE}, ensure_ascii=False), None)
    assert driving(shown) == set()
    assert json.loads(shown) == {"a": HOSTILE}


def test_a_verdicts_texts_have_an_end() -> None:
    found = tuple(Tampering(kind="k" * 9999, detail="x\x1b" * 5_000_000) for _ in range(300))
    verdict = Verdict(
        reward=0.0, trust=Trust.NONE, grader="g" * 9_000_000, graded_hash="x", tampering=found,
        checks={f"{n}{'c' * 3_000}": "f" * 10_000 for n in range(20_000)}, failure_kind="k" * 9_000_000,
    )  # fmt: skip
    written = verdict.model_dump_json()
    assert len(written) < 16_000_000
    assert len(verdict.tampering) == 100
    assert len(verdict.tampering[0].detail) <= 1000
    assert Verdict.model_validate_json(written) == verdict, "read back it is what it was"
    assert driving(verdict.tampering[0].detail) == set()


@pytest.mark.parametrize("most", [100, 1000])
def test_a_cut_text_is_cut_once(most: int) -> None:
    once = printable("\x1b" * 5000, most)
    assert len(once) <= most
    assert printable(once, most) == once
    assert "5000" in once


def test_everything_printed_goes_through_the_one_place() -> None:
    """Rich's own console takes markup from text and lets escape sequences pass."""
    root = Path(__file__).parents[2]
    others = [
        str(path.relative_to(root))
        for package in ("nano_coder", "nano_rl", "shared/nano_shared")
        for path in (root / package).rglob("*.py")
        if path.name != "command_line.py"
        and any(
            w in path.read_text()
            for w in ("from rich import print", "rich.console import Console", "rich.print(")
        )
    ]
    assert others == []
