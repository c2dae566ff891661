"""Extensions that are broken, hostile or twice there: a sentence each that names the source, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import pytest

from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1, PROFILES, find_profile, serving_profile, with_tools
from nano_coder.models.opening import open_policy
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.tool import TOOLS
from nano_formats.row_format import find_format
from nano_preferences.registry import part_kind
from nano_rl.cli import cli as rl_cli
from nano_rl.learn.objectives import find_objective
from nano_rl.tasks.suite import find_suite
from nano_shared import extension_points
from nano_shared.command_line import run_command
from nano_shared.errors import NanoError, UsageError
from nano_shared.extension_points import find_extension
from nano_shared.types import Task

Write = Callable[[str], Path]
TOOL = "from nano_coder.tools.tool import ToolContext, tool\n"
WEATHER = (
    TOOL + "@tool()\ndef weather(context: ToolContext, city: str) -> str:\n    'Tell it.'\n    return city\n"
)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of extensions."""

    def save(source: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(source)
        return path

    return save


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Put a package that registers things onto the path."""

    def put(package: str, group: str, name: str, value: str, **modules: str) -> Path:
        folder = tmp_path / f"site-{len(list(tmp_path.iterdir()))}"
        info = folder / f"{package}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        extension_points._entry_points.cache_clear()
        extension_points._registered.cache_clear()
        return folder

    yield put
    monkeypatch.undo()
    extension_points._entry_points.cache_clear()
    extension_points._registered.cache_clear()


def refused(find: Callable[[], object], *words: str) -> None:
    with pytest.raises(NanoError) as caught:
        find()
    said = str(caught.value)
    assert caught.value.exit_code in (2, 3)
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said.strip()


# --------------------------------------------------------------------------------- installed packages


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('out of tea')", "raised RuntimeError: out of tea at import"),
        ("import sys; sys.exit(7)", "raised SystemExit: 7 at import"),
        ("import there_is_no_such_module", "cannot be loaded: No module named 'there_is_no_such_module'"),
        ("other = 1", "cannot be loaded"),
        ("def", "raised SyntaxError"),
    ],
)
def test_a_package_that_cannot_be_loaded_is_named(
    install: Callable[..., Path], source: str, said: str, request: pytest.FixtureRequest
) -> None:
    module = f"broken_{abs(hash(request.node.name))}"
    install("teapot", "nano.tools", "pour", f"{module}:pour", **{module: source})
    refused(lambda: TOOLS.find("pour"), f"{module}:pour (package teapot)", said)


def test_a_package_made_for_another_version_of_nano_is_refused_before_it_is_imported(
    install: Callable[..., Path],
) -> None:
    folder = install(
        "teapot", "nano.tools", "serve_tea", "tea_of_later:pour", tea_of_later="raise SystemExit(7)"
    )
    with (folder / "teapot-1.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: nano-rl-coder[rl]>=9\nRequires-Dist: attrs>99\n")
    reason = "needs nano-rl-coder>=9, and this is nano-rl-coder 0."
    refused(lambda: TOOLS.find("serve_tea"), "tea_of_later:pour (package teapot)", reason)


def test_a_broken_package_disturbs_nobody_who_does_not_ask_for_it(install: Callable[..., Path]) -> None:
    install("teapot", "nano.tools", "boil", "no_such_module_1:boil")
    assert "boil" in TOOLS
    assert TOOLS.find("submit").spec.name == "submit"


def test_two_packages_of_one_name_are_both_named(install: Callable[..., Path]) -> None:
    install("first", "nano.suites", "twice", "first_m:SUITE")
    install("second", "nano.suites", "twice", "second_m:SUITE")
    refused(lambda: find_suite("twice"), "first_m:SUITE (package first)", "second_m:SUITE (package second)")
    assert find_suite("logic").name == "logic"


def test_the_list_of_suites_names_what_is_broken_and_shows_the_rest(
    install: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    install("teapot", "nano.suites", "brew", "no_such_module_2:SUITE")
    with pytest.raises(SystemExit) as ended:
        run_command(rl_cli, ["tasks", "list", "--suites", "--json"])
    assert ended.value.code == 3
    said = capsys.readouterr()
    assert {"logic", "shell"} < {row["suite"] for row in json.loads(said.out)}
    assert said.err.startswith("error: no_such_module_2:SUITE (package teapot) cannot be loaded")


def test_a_package_cannot_take_the_name_of_ours_in_silence(install: Callable[..., Path]) -> None:
    install("thief", "nano.suites", "logic", "thief_m:SUITE")
    refused(lambda: find_suite("logic"), "several 'logic'", "nano_suites.logic:SUITE", "(package thief)")


def test_a_package_that_is_on_the_path_twice_is_one(install: Callable[..., Path]) -> None:
    install("once", "nano.tools", "weather_1", "once_m:weather_1")
    install("once", "nano.tools", "weather_1", "once_m:weather_1")
    assert list(TOOLS).count("weather_1") == 1


def test_a_tool_is_registered_under_its_own_name(install: Callable[..., Path]) -> None:
    install("liar", "nano.tools", "forecast", "liar_m:weather", liar_m=WEATHER)
    refused(lambda: TOOLS.find("forecast"), "'weather'", "registered in nano.tools as 'forecast'")


def test_what_is_unknown_is_refused_with_the_names_there_are() -> None:
    refused(lambda: TOOLS.find("fly"), "nano.tools has no 'fly'", "read_file", "or path.py:name")
    refused(lambda: find_suite("fly"), "unknown suite 'fly'", "functions", "shell")
    refused(lambda: part_kind("fly"), "unknown reward part 'fly'", "tests")
    refused(lambda: find_objective("fly"), "nano.objectives has no 'fly'", "grpo")
    refused(lambda: find_format("fly"), "unknown format 'fly'", "harbor", "nemo-gym")
    refused(lambda: open_sandbox("fly"), "unknown sandbox 'fly'", "ns")
    refused(lambda: DIALECTS.find("fly"), "nano.dialects has no 'fly'; there are api, compact", "hermes")
    refused(lambda: find_extension("nano.nothing", "fly"), "nano.nothing has no 'fly'; there are none")


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (TOOL + "@tool()\ndef t(context, city): ...", "tool 't': its argument 'city' has no type annotation"),
        (TOOL + "@tool()\ndef t(): ...", "tool 't' takes nothing"),
        (TOOL + "@tool()\ndef t(context, *names: str): ...", "*names: str cannot be given by name"),
        (TOOL + "@tool()\ndef t(context, x: 'Nowhere'): ...", "annotation cannot be read"),
        (TOOL + "class X: ...\n@tool()\ndef t(context, x: X): ...", "its arguments have no JSON schema"),
        (TOOL + "@tool(body='text')\ndef t(context, x: str): ...", "no argument 'text' to be its body"),
        ("def t(context, x: str): ...", "is of type function, and no Tool: put @tool()"),
        ("t = 3", "is of type int, and no Tool"),
        ("other = 3", "defines no 't'; nothing in it fits"),
        ("1 / 0", "raised ZeroDivisionError: division by zero at import"),
        (
            TOOL + "@tool()\ndef submit(context): ...\nt = submit",
            "there is another tool called 'submit'; rename the function",
        ),
    ],
)
def test_a_file_that_holds_no_tool_is_named(write: Write, source: str, said: str) -> None:
    path = write(source)
    refused(lambda: TOOLS.give(f"{path}:t"), str(path), said)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(lambda: TOOLS.give(f"{tmp_path}/none.py:t"), "no such file", f"{tmp_path}/none.py")


SUITE = "from nano_rl.tasks.suite import *\n"
PART = "from nano_rl.rewards.reward import Part\n"
OBJECTIVE = "from nano_rl.learn.objectives import Objective\n"


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("find", "source", "said"),
    [
        (find_suite, "x = 3", "is of type int, and nano.suites takes values of type TaskSuite"),
        (find_suite, SUITE + "x = TaskSuite", "is the class TaskSuite, and nano.suites takes"),
        (find_suite, SUITE + "x = TaskSuite(name='x', version='1', about='', views=())", "has no views"),
        (
            find_suite,
            SUITE + "x = TaskSuite(name='x', version='1', about='', views=(View('v', 0, lambda rng: 1),))",
            "has a view 'v' whose `make` is called with (rng, split, level), and takes (rng)",
        ),
        (part_kind, "x = 3", "is no subclass of nano_rl.rewards.reward.Part"),
        (part_kind, PART + "class x(Part): ...", "scores nothing"),
        (
            part_kind,
            PART + "class x(Part):\n    def score_run(self, run): ...",
            "is called with (self, run, runtime), and takes (self, run)",
        ),
        (find_objective, "def x(): ...", "is of type function, and nano.objectives takes"),
        (
            find_objective,
            OBJECTIVE + "x = Objective(surrogate=lambda a, b: a)",
            "has a surrogate that is called with (new_N, ratio_N, advantages_N, config), and takes (a, b)",
        ),
        (DIALECTS.find, "class x: ...", "is the class x; register an instance"),
        (DIALECTS.find, "x = 3", "is no dialect: it has no parse"),
        (PROFILES.find, "x = 3", "is of type int, and nano.profiles takes"),
        (open_policy, "x = 3", "is of type int, and should be a function of (name, options)"),
        (open_policy, "def x(name): ...", "is called with (name, options), and takes (name)"),
        (open_policy, "def x(name, options): ...", "is of type NoneType, and no Policy"),
        (open_policy, "def x(name, options): 1 / 0", "raised ZeroDivisionError: division by zero"),
        (open_sandbox, "def x(): ...", "is called with (python), and takes ()"),
        (open_sandbox, "def x(python): ...", "is of type NoneType without name, layers, python, open"),
        (find_format, "x = 3", "is no format of tasks: it has no name"),
    ],
)
def test_what_is_of_another_kind_or_signature_is_named(
    write: Write, find: Callable[[str], object], source: str, said: str
) -> None:
    path = write(source)
    refused(lambda: find(f"{path}:x"), "mine.py:x", said)


def test_an_objective_with_a_term_that_does_not_exist_is_named(write: Write) -> None:
    path = write(OBJECTIVE + "x = Objective(surrogate=lambda a, b, c, d: a, clip=1)")
    refused(lambda: find_objective(f"{path}:x"), "mine.py raised ValidationError: clip: Extra inputs are not")


# -------------------------------------------------------------------------------------- tools and profiles


def test_a_tool_of_a_file_makes_another_profile_and_changes_none(write: Write) -> None:
    path = write(WEATHER.replace("weather", "weather_2"))
    before = COMPACT_1.hash, COMPACT_1.tools_hash
    assert TOOLS.give(f"{path}:weather_2") is TOOLS.find("weather_2")
    more = with_tools(COMPACT_1, ["weather_2", "sql"])
    assert more.name == "compact-1+sql+weather_2"
    assert more == find_profile(more.name) == with_tools(with_tools(COMPACT_1, ["sql"]), ["weather_2"])
    assert [tool.name for tool in more.tools[-2:]] == ["sql", "weather_2"]
    assert {before, (COMPACT_1.hash, COMPACT_1.tools_hash)} == {before}
    assert more.tools_hash != COMPACT_1.tools_hash
    assert with_tools(COMPACT_1, ["shell"]) is COMPACT_1


def test_a_task_that_names_an_installed_tool_is_served_with_it(install: Callable[..., Path]) -> None:
    install(
        "sky", "nano.tools", "weather_3", "sky_m:weather_3", sky_m=WEATHER.replace("weather", "weather_3")
    )
    task = Task(key="t", prompt="?", tools=("weather_3", "submit"))
    assert serving_profile(COMPACT_1, task).name == "compact-1+weather_3"


def test_a_profile_whose_tool_is_missing_says_which() -> None:
    assert "compact-1+fly" not in PROFILES
    with pytest.raises(
        UsageError, match=r"needs the tool 'fly', which is not at hand: .* --tool FILE.py:NAME"
    ):
        find_profile("compact-1+fly")


@pytest.mark.parametrize(
    ("body", "said"), [("1 / 0", "raised ZeroDivisionError"), ("return 3", "returned a int")]
)
def test_a_tool_that_fails_is_an_observation(write: Write, body: str, said: str) -> None:
    from nano_coder.tools.tool import ToolContext, ToolFailure

    path = write(TOOL + f"@tool()\ndef t(context: ToolContext, x: int):\n    'Do.'\n    {body}\n")
    found = find_extension("nano.tools", f"{path}:t", check=None)
    with pytest.raises(ToolFailure, match=said):
        found(ToolContext(jail=None, limits=None), {"x": 1})  # type: ignore[operator,arg-type]


# ------------------------------------------------------------------------------------- the command line


def command(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = f"from {arguments[0]}.cli import main; main()"
    environment = os.environ | {"NANO_HOME": str(cwd / "home")} | ({"PYTHONPATH": str(path)} if path else {})
    if path is None:
        return forked.run(arguments[0].replace("_", "-"), *arguments[1:], env=environment, cwd=cwd)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments[1:]],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nano_coder", "run", "x", "--tool", "mine.py:t"), ("mine.py", "'city' has no type annotation")),
        (("nano_coder", "run", "x", "--model", "mine.py:t"), ("mine.py", "no type annotation")),
        (("nano_coder", "run", "x", "--sandbox", "far"), ("unknown sandbox 'far'", "ns")),
        (("nano_rl", "tasks", "make", "--suite", "mine.py:t"), ("mine.py", "no type annotation")),
        (("nano_rl", "tasks", "import", "mine.py", "--from", "far"), ("unknown format 'far'", "harbor")),
    ],
)
def test_a_command_says_one_sentence(
    write: Write, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    write(TOOL + "@tool()\ndef t(context: ToolContext, city): ...")
    done = command(*arguments, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert [word for word in words if word not in line] == [], line
    assert (done.returncode in (2, 3), done.stdout) == (True, "")


def test_help_loads_no_extension(install: Callable[..., Path], tmp_path: Path) -> None:
    folder = install("loud", "nano.tools", "shout", "loud_m:shout", loud_m="raise SystemExit('loaded')")
    for arguments in (("nano_coder", "run"), ("nano_rl", "tasks", "make")):
        done = command(*arguments, "--help", cwd=tmp_path, path=folder)
        assert (done.returncode, done.stderr) == (0, "")
    loaded = (
        "import sys, nano_coder.cli, nano_rl.cli;"
        "print([m for m in sys.modules if '.tools' in m or '.suites' in m])"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------------------- the document


REPOSITORY = Path(__file__).parents[2]
DOCUMENT = REPOSITORY / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n# (.*?)```", DOCUMENT.read_text().partition("## From Python")[0], re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_of_the_document_is_that_of_the_examples(block: str) -> None:
    file, _, code = block.partition("\n")
    assert code in (REPOSITORY / "examples/plugins/src/nano_example_plugins" / file).read_text()


def test_the_document_and_the_example_know_every_group() -> None:
    projects = [REPOSITORY / "pyproject.toml", *(REPOSITORY / "plugins").glob("*/pyproject.toml")]
    ours = set().union(*(tomllib.loads(p.read_text())["project"].get("entry-points", {}) for p in projects))
    example = tomllib.loads((REPOSITORY / "examples/plugins/pyproject.toml").read_text())
    theirs = ours
    assert set(re.findall(r"- `(nano\.[a-z_]+)`", DOCUMENT.read_text())) == theirs
    # of these our plug-ins are the examples
    large = {"workers", "learners", "terms", "settings", "run_tools", "views", "trainings"}
    large |= {
        "log_databases",
        "blob_stores",
        "critics",
        "gatherers",
        "controls",
        "plans",
    }
    large |= {"reward_composers", "general_tasks", "project_tasks", "task_checks", "task_rows"}
    large |= {"apis", "agents", "checks", "checkpoints", "images"}
    assert set(example["project"]["entry-points"]) == theirs - {f"nano.{name}" for name in large}


def test_our_own_entry_points_can_be_loaded_each_first_of_all() -> None:
    pytest.importorskip("torch")
    ours = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {value for group in ours.values() for value in group.values()}
    first = {value.partition(":")[0]: value for value in sorted(found)}
    code = (
        "import sys; from importlib.metadata import EntryPoint\n"
        "for value in sys.argv[1:]: EntryPoint('name', value, 'group').load()"
    )
    done = subprocess.run([sys.executable, "-c", code, *sorted(found)], capture_output=True, text=True)
    assert done.stderr == ""
    # one that needs torch is loaded before what loads it
    for value in (value for module, value in first.items() if ".objectives." in module):
        done = subprocess.run([sys.executable, "-c", code, value], capture_output=True, text=True)
        assert done.stderr == "", value
