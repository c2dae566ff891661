"""Each tool does what its description says, in a real jail, and a failure is a sentence for the model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from threading import BoundedSemaphore
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_coder.tools.tool import TOOLS, ToolContext, ToolFailure, ToolResult
from nano_shared.types import Limits

Use = Callable[..., ToolResult]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox()


@pytest.fixture
def context(sandbox: Sandbox) -> Iterator[ToolContext]:
    limits = Limits(memory_mb=256, tool_seconds=20)
    with closing(sandbox.open(None, limits)) as jail:
        yield ToolContext(jail=jail, limits=limits)


@pytest.fixture
def use(context: ToolContext) -> Use:
    return lambda name, **arguments: TOOLS[name](context, arguments)


def failure(use: Use, name: str, **arguments: Any) -> str:
    with pytest.raises(ToolFailure) as raised:
        use(name, **arguments)
    return str(raised.value)


# ----------------------------------------------------------------------------------------- read_file


def test_read_file_numbers_the_lines(use: Use, context: ToolContext) -> None:
    context.jail.write("a.py", b"one\n\nthree")
    assert use("read_file", path="a.py").text == "1|one\n2|\n3|three"


def test_read_file_shows_a_range(use: Use, context: ToolContext) -> None:
    context.jail.write("a.py", b"one\ntwo\nthree\n")
    assert use("read_file", path="a.py", start=2, end=2).text == "2|two"
    assert use("read_file", path="a.py", start=3, end=99).text == "3|three"
    assert failure(use, "read_file", path="a.py", start=4) == "a.py has lines 1 to 3, not 4 to 3"
    assert failure(use, "read_file", path="a.py", start=3, end=2) == "a.py has lines 1 to 3, not 3 to 2"
    assert failure(use, "read_file", path="a.py", start=0) == "a.py has lines 1 to 3, not 0 to 3"


def test_read_file_says_that_a_file_is_empty(use: Use, context: ToolContext) -> None:
    context.jail.write("empty", b"")
    assert use("read_file", path="empty").text == "[empty file]"


def test_read_file_says_why_it_cannot(use: Use, context: ToolContext) -> None:
    context.jail.write("folder/binary", b"\xff\x00")
    context.jail.run(["ln", "-s", "loop", "loop"])
    context.jail.run(["mkfifo", "pipe"])
    assert failure(use, "read_file", path="nothing.py") == "no such file: nothing.py"
    assert failure(use, "read_file", path="folder") == "folder is a directory"
    assert failure(use, "read_file", path="folder/binary") == "folder/binary is not UTF-8 text"
    assert "outside the workspace" in failure(use, "read_file", path="/etc/passwd")
    assert "outside the workspace" in failure(use, "read_file", path="../x")
    assert failure(use, "read_file", path="folder/binary/x").startswith("cannot read folder/binary/x")
    for path in ("loop", "pipe", "n" * 300, "n/" * 3000, "", "a\0b", "a\ud800"):
        assert failure(use, "read_file", path=path)


# ------------------------------------------------------------------------- write_file and edit_file


def test_write_file_creates_and_replaces(use: Use, context: ToolContext) -> None:
    assert use("write_file", path="new/deep/a.py", content="é\n").text == "wrote new/deep/a.py"
    assert context.jail.read("new/deep/a.py") == "é\n".encode()
    use("write_file", path="new/deep/a.py", content="")
    assert context.jail.read("new/deep/a.py") == b""


def test_write_file_says_why_it_cannot(use: Use, context: ToolContext) -> None:
    context.jail.write("folder/a", b"")
    context.jail.run(["ln", "-s", "/etc", "out"])
    for path in ("folder", "folder/a/b", "../x", "/etc/passwd", "out/x", "n" * 300, "", "a\0b"):
        assert failure(use, "write_file", path=path, content="x").startswith("cannot write ")


def test_edit_file_replaces_a_line(use: Use, context: ToolContext) -> None:
    context.jail.write("a.py", b"one\ntwo\nthree")
    assert use("edit_file", path="a.py", line=2, new="2\n2b").text == "edited a.py"
    assert context.jail.read("a.py") == b"one\n2\n2b\nthree"
    use("edit_file", path="a.py", line=4, new="end")
    assert context.jail.read("a.py") == b"one\n2\n2b\nend"


def test_edit_file_numbers_lines_as_read_file_does(use: Use, context: ToolContext) -> None:
    context.jail.write("a.py", "one\x0cstill one\u2028\ntwo\r\nthree\n".encode())
    assert use("read_file", path="a.py").text.splitlines()[-1] == "3|three"
    use("edit_file", path="a.py", line=3, new="3")
    assert context.jail.read("a.py") == "one\x0cstill one\u2028\ntwo\r\n3\n".encode()


def test_edit_file_keeps_the_ending_of_a_line(use: Use, context: ToolContext) -> None:
    context.jail.write("a.txt", b"one\r\ntwo\r\n")
    use("edit_file", path="a.txt", line=1, new="1")
    assert context.jail.read("a.txt") == b"1\r\ntwo\r\n"


def test_edit_file_replaces_the_only_occurrence(use: Use, context: ToolContext) -> None:
    context.jail.write("a.py", b"x = 1\ny = 1\n")
    use("edit_file", path="a.py", old="x = 1", new="x = 2")
    assert context.jail.read("a.py") == b"x = 2\ny = 1\n"
    for old, times in (("= ", 2), ("zzz", 0), ("", 0)):
        said = failure(use, "edit_file", path="a.py", old=old, new="!")
        assert said == f"old must occur exactly once in a.py; it occurs {times} times"
    assert context.jail.read("a.py") == b"x = 2\ny = 1\n"


def test_edit_file_needs_one_way_to_find_the_place(use: Use, context: ToolContext) -> None:
    context.jail.write("a.py", b"one\n")
    either = "give either line (a number) or old (a text that occurs once)"
    assert failure(use, "edit_file", path="a.py", new="x") == either
    assert failure(use, "edit_file", path="a.py", new="x", line=1, old="one") == either
    for line in (0, 2, -1):
        assert failure(use, "edit_file", path="a.py", new="x", line=line) == (
            f"a.py has lines 1 to 1, not {line}"
        )
    assert failure(use, "edit_file", path="b.py", new="x", line=1) == "no such file: b.py"


def test_edit_file_says_that_nothing_changed(use: Use, context: ToolContext) -> None:
    """A model that copies the line which it was to mend hears of it, and can go on."""
    context.jail.write("a.py", b"one\ntwo\r\nthree")
    for line, text in ((1, "one"), (1, "one\n"), (2, "two"), (3, "three")):
        said = failure(use, "edit_file", path="a.py", line=line, new=text)
        assert said == (
            f"nothing changed: line {line} of a.py reads like new already; give another place, or other text"
        )
    said = failure(use, "edit_file", path="a.py", old="two", new="two")
    assert said == "nothing changed: old in a.py reads like new already; give another place, or other text"
    assert context.jail.read("a.py") == b"one\ntwo\r\nthree"


# ------------------------------------------------------------------------------------------- search


def test_search_names_path_line_and_text(use: Use, context: ToolContext) -> None:
    context.jail.write("src/a.py", b"def f():\n    return 1\n")
    context.jail.write("b.py", b"f()\n")
    context.jail.write(".hidden/c.py", b"f()\n")
    context.jail.write("binary", b"\0f()")
    assert use("search", pattern=r"f\(\)").text == "b.py:1:f()\nsrc/a.py:1:def f():"
    assert use("search", pattern="return", path="src").text == "src/a.py:2:    return 1"
    assert use("search", pattern="f", path="b.py").text == "b.py:1:f()"
    assert use("search", pattern="nowhere").text == "[no match]"


def test_search_says_why_it_cannot(use: Use) -> None:
    assert failure(use, "search", pattern="x", path="nothing") == "no such file: nothing"
    assert "error" in failure(use, "search", pattern="(")
    assert failure(use, "search", pattern="a\0")
    assert failure(use, "search", pattern="a", path="\ud800")


# --------------------------------------------------------------------------------- shell and python


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("command", "text", "exit_code"),
    [
        ("echo hi", "hi", 0),
        ("echo out; echo err >&2; exit 3", "out\nerr\n[exit code 3]", 3),
        ("true", "[no output]", 0),
        ("false", "[exit code 1]", 1),
        ("kill -9 $$", "[killed by signal 9]", None),
        ("nothing-of-that-name 2>/dev/null", "[exit code 127]", 127),
        (r"printf '\377'", "\\xff", 0),
    ],
)
def test_shell_shows_output_and_how_it_ended(
    use: Use, command: str, text: str, exit_code: int | None
) -> None:
    result = use("shell", command=command)
    assert result.text == text
    assert result.execution is not None
    assert result.execution.exit_code == exit_code
    assert result.ok is (exit_code == 0)


def test_shell_says_that_time_was_up(sandbox: Sandbox) -> None:
    for seconds in (0.5, 5.0, 50.0):  # on a busy machine a shell may need more than the first to begin
        limits = Limits(memory_mb=256, tool_seconds=seconds)
        with closing(sandbox.open(None, limits)) as jail:
            context = ToolContext(jail=jail, limits=limits)
            result = TOOLS["shell"](context, {"command": "echo before; sleep 1000"})
        if result.text.startswith("before"):
            break
    assert (result.text, result.ok) == ("before\n[timed out]", False)


@pytest.mark.slow
def test_commands_of_many_agents_take_turns_and_waiting_is_not_on_their_clock(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[ToolContext.__module__], "_at_once", BoundedSemaphore(1))
    limits = Limits(memory_mb=256, tool_seconds=6)

    def command(_: int) -> tuple[int, int]:
        with closing(sandbox.open(None, limits)) as jail:
            context = ToolContext(jail=jail, limits=limits)
            result = TOOLS["shell"](context, {"command": "date +%s%N; sleep 1; date +%s%N"})
        began, ended = map(int, result.text.split())
        return began, ended

    with ThreadPoolExecutor(8) as agents:
        spans = sorted(agents.map(command, range(8)))  # 8 s in all, which one call may not take
    assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))


def test_python_runs_in_the_workspace(use: Use, context: ToolContext) -> None:
    assert use("python", code="open('made', 'w').write('x'); print('done')").text == "done"
    assert context.jail.read("made") == b"x"
    failed = use("python", code="1 / 0")
    assert failed.text.endswith("ZeroDivisionError: division by zero\n[exit code 1]")
    assert not failed.ok


def test_a_command_line_given_to_python_is_told_which_tool_runs_it(use: Use, context: ToolContext) -> None:
    assert (
        "a command line, not a Python program; shell runs it"
        in use("python", code="python -m pytest -q").text
    )
    assert "command line" not in use("python", code="print(1 +").text
    assert "command line" not in use("python", code="x = fail").text


@pytest.mark.parametrize(("tool", "key"), [("shell", "command"), ("python", "code")])
@pytest.mark.parametrize("text", ["echo \0", "echo \ud800"])
def test_a_program_that_cannot_be_passed_on_is_an_observation(
    use: Use, tool: str, key: str, text: str
) -> None:
    assert failure(use, tool, **{key: text})


def test_a_command_line_that_is_too_long_is_an_observation(use: Use) -> None:
    assert use("shell", command="x" * 200_000).text.endswith("Argument list too long\n[exit code 126]")


def test_a_long_program_runs(use: Use) -> None:
    assert use("python", code=f"text = '{'x' * 200_000}'\nprint(len(text))").text == "200000"


# ---------------------------------------------------------------------------------------- calculate

_numbers = st.integers(-50, 50).map(str) | st.floats(-50, 50).map(lambda x: repr(round(x, 3)))
_operators = st.sampled_from(["+", "-", "*", "//", "/", "%"])
_expressions = st.recursive(
    _numbers,
    lambda inner: st.builds("({} {} {})".format, inner, _operators, inner)
    | st.builds("-({})".format, inner),
    max_leaves=12,
)  # fmt: skip


@given(_expressions)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_calculate_agrees_with_python(use: Use, expression: str) -> None:
    try:
        expected = eval(expression)
    except ArithmeticError as problem:
        expected, said = None, str(problem)
    if expected is None:
        assert said in failure(use, "calculate", expression=expression)
    else:
        assert use("calculate", expression=expression).text == str(expected)


def test_calculate_knows_powers_and_a_few_functions(use: Use) -> None:
    assert use("calculate", expression=" 2 ** 10 ").text == "1024"
    assert use("calculate", expression="max(1, abs(-7), min(3, 2)) + round(2.6)").text == "10"


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0", "x + 1", "__import__('os')", "open('a')", "(1).real", "[1][0]", "'a' * 3", "True + 1",
        "2 ** 5000", "10 ** 1000 ** 3", "9 ** 999 ** 2", "(9 ** 999) ** 999", "(-8) ** 0.5", "10.0 ** 400",
        "round(1, -1000000000)", "round(1, n=2)", "min()", "abs(1, 2)", "1 +", "", "\0", "1\n2", "\ud800",
        "(" * 250 + "1" + ")" * 250, "1" * 501, "max(*[1])", "1 if 1 else 2", "2 ** -5000",
        "(lambda: 1)()", "f'{1}'", "1j",
    ],
)  # fmt: skip
def test_calculate_refuses_what_is_not_arithmetic(use: Use, expression: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        assert failure(use, "calculate", expression=expression)


def test_calculate_names_what_it_refused(use: Use) -> None:
    said = failure(use, "calculate", expression="pay * 2")
    assert said == "cannot calculate 'pay * 2': only numbers and + - * / // % ** are allowed, not 'pay'"
    assert failure(use, "calculate", expression="1/0") == "cannot calculate '1/0': division by zero"


# -------------------------------------------------------------------------- submit, and all of them


def test_submit_finishes_with_or_without_an_answer(use: Use) -> None:
    assert (use("submit").finished, use("submit").answer) == (True, None)
    assert use("submit", answer="42").answer == "42"


def test_wrong_arguments_say_what_is_right(use: Use) -> None:
    usage = "Usage: edit_file(path, new, line?, old?)"
    assert failure(use, "edit_file", path="a.py") == f"new is missing. {usage}"
    assert failure(use, "edit_file", path="a", new="b", lines=3) == f"unknown argument lines. {usage}"
    said = failure(use, "edit_file", path="a", new="b", line="x")
    assert said.startswith("line: ")
    assert said.endswith(usage)


def test_null_counts_as_not_given_where_an_argument_is_optional(use: Use, context: ToolContext) -> None:
    context.jail.write("a", b"1\n2\n")
    assert use("read_file", path="a", start=None, end=None).text == "1|1\n2|2"
    assert use("grep", pattern="1", path=None, glob=None, ignore_case=None, around=None).text == "a:1:1"
    assert use("edit_file", path="a", new="3", line=1, old=None).text == "edited a"
    assert failure(use, "read_file", path=None).startswith("path: input should be a valid string. Usage: ")
    assert failure(use, "write_file", path="a", content=None).startswith("content: ")


def test_an_unknown_argument_is_ignored_with_a_note_only_where_that_changes_nothing(
    use: Use, context: ToolContext
) -> None:
    context.jail.write("a", b"1\n")
    read = use("read_file", path="a", encoding="utf-8")
    assert (
        read.text == "1|1\n[ignored, since it is no argument: encoding. Usage: read_file(path, start?, end?)]"
    )
    assert read.repairs == ("ignored encoding",)
    assert failure(use, "read_file", path="a", strat=1).startswith("unknown argument strat. Usage: ")
    assert use("shell", command="echo x", description="says x").text.startswith("x\n[ignored")
    said = failure(use, "write_file", path="a", content="2\n", append=True)
    assert said == "unknown argument append. Usage: write_file(path, content)"
    assert context.jail.read("a") == b"1\n"


@pytest.mark.parametrize(
    ("tool", "more"),
    [
        ("read_file", {}), ("read", {}), ("edit_file", {"line": 1, "new": "x"}), ("search", {"pattern": "x"}),
        ("grep", {"pattern": "x"}), ("glob", {}),
        ("apply_patch", {"patch": "*** Begin Patch\n*** Delete File: PATH\n*** End Patch"}),
    ],
)  # fmt: skip
def test_a_missing_path_is_answered_with_the_near_ones(
    tool: str, more: dict[str, Any], use: Use, context: ToolContext
) -> None:
    for path in (
        "src/parser.py",
        "lib/parser.py",
        "lib/deep/parser.py",
        "more/parser.py",
        "tests/test_pars.py",
    ):
        context.jail.write(path, b"1\n")

    def said(path: str) -> str:
        given = {
            key: str(value).replace("PATH", path) if key == "patch" else value for key, value in more.items()
        }
        return failure(use, tool, **given, **({} if tool == "apply_patch" else {"path": path}))

    near = "; near it: 'lib/parser.py', 'src/parser.py', 'more/parser.py'"
    assert said("parser.py").endswith(near)
    assert said("src/Parser.py").endswith("; near it: 'src/parser.py', 'more/parser.py', 'lib/parser.py'")
    assert "; near it: 'lib/deep/parser.py', " in said("deep/parser.py")
    assert said("tests/test_parse.py").endswith("; near it: 'tests/test_pars.py'")
    assert "near" not in said("zzz")


def test_a_file_in_a_new_folder_is_written_and_folders_near_it_are_told(
    use: Use, context: ToolContext
) -> None:
    context.jail.write("src/pkg/number.py", b"1\n")
    said = use("write_file", path="pkg/words.py", content="2\n").text
    assert said == "wrote pkg/words.py; pkg is a new folder; near it: 'src/pkg'"
    assert use("write_file", path="pkg/other.py", content="3\n").text == "wrote pkg/other.py"
    assert use("write_file", path="elsewhere/one.py", content="4\n").text == "wrote elsewhere/one.py"


def test_a_schema_is_the_signature() -> None:
    spec = TOOLS["read_file"].spec
    assert (spec.name, spec.body) == ("read_file", None)
    assert spec.description == "Show a text file, each line behind its number."
    assert spec.parameters["required"] == ["path"]
    assert list(spec.parameters["properties"]) == ["path", "start", "end"]


def test_only_what_may_change_the_workspace_is_followed_by_a_snapshot() -> None:
    assert {name for name, tool in TOOLS.items() if tool.mutates} == {
        "edit_file", "write_file", "shell", "python", "sql", "apply_patch", "bash", "job", "locate",
        "edit_line",
    }  # fmt: skip
