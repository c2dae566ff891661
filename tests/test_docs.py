"""Documentation that can rot is tested: the files it names exist, its commands and queries run."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from nano_coder import cli as coder
from nano_rl import cli as rl
from nano_shared.store import LogStore

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "plugins").glob("*/README.md")),
    ]
}
FOLDERS = "nano_coder|nano_rl|shared|tests|benchmarks|integration|examples|docs|plugins"
MODULES = {"nano_coder": ROOT, "nano_rl": ROOT, "nano_shared": ROOT / "shared"} | {
    package.name: package.parent for package in (ROOT / "plugins").glob("*/nano_*")
}


@functools.cache
def files() -> frozenset[str]:
    """Every file of the repository, from its root, with a slash in front."""
    told = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if told.returncode == 0:
        return frozenset("/" + name for name in told.stdout.splitlines() if (ROOT / name).exists())
    return frozenset(f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*") if ".venv" not in path.parts)


def test_every_file_of_the_readme_tree_exists() -> None:
    tree = README.split("## Where things are")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
            assert folder.exists(), name
        else:
            assert (folder / name).exists(), name


@pytest.mark.parametrize("path", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_link_of_the_readme_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", coder.COMMANDS)
def test_the_readme_shows_every_command_of_nano_coder(name: str) -> None:
    assert f"nano-coder {name}" in README


@pytest.mark.parametrize("name", rl.COMMANDS)
def test_the_readme_shows_every_command_of_nano_rl(name: str) -> None:
    assert f"nano-rl {name}" in README


@functools.cache
def settings_that_are_no_options() -> frozenset[str]:
    """`--NAME` of each setting of a command that --set alone reaches."""
    known, settings = set[str](), set[str]()
    groups: list[Any] = [typer.main.get_command(cli) for cli in (coder.cli, rl.cli)]
    while groups:
        group = groups.pop()
        for command in map(group.load, group.targets):
            if hasattr(command, "load"):
                groups.append(command)
                continue
            known |= {option for param in command.params for option in param.opts}
            settings |= {"--" + name.rpartition(".")[2].replace("_", "-") for name in command.settings}
    return frozenset(settings - known - {"--max-turns"})  # of integration/foreign_agent.py


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_setting_as_an_option(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGES[page]))
    assert named & settings_that_are_no_options() == set()


@pytest.mark.parametrize("query", re.findall(r"```sql\n(.*?)```", README, re.DOTALL)[0].strip().split(";\n"))
def test_the_queries_of_the_readme_run(query: str, tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        assert store.sql(query.strip().rstrip(";")).rows == []


def test_the_readme_is_true_about_its_license() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    """`nano_rl/learn/update.py` from the root; `launcher/archive.py` or `engine.py` somewhere below it."""
    named = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w", PAGES[page])
    gone = [path for path in named if not (ROOT / path.removesuffix(".")).exists()]
    modules = re.findall(r"`([\w/]+\.py)(?:::\w+)?`", PAGES[page])
    gone += [path for path in modules if not any(file.endswith(f"/{path}") for file in files())]
    assert gone == []


@pytest.mark.parametrize("page", PAGES)
def test_every_module_name_of_a_page_exists(page: str) -> None:
    """`nano_rl.learn.update.Updater`: a module, and names that its text holds."""
    gone = []
    for name in re.findall(rf"(?<![\w/.-])(?:{'|'.join(MODULES)})(?:\.\w+)+", PAGES[page]):
        path, parts = MODULES[name.split(".")[0]], name.split(".")
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        if parts and (path / f"{parts[0]}.py").exists():
            path /= f"{parts.pop(0)}.py"
        text = (path if path.is_file() else path / "__init__.py").read_text(encoding="utf-8")
        if not all(re.search(rf"\b{part}\b", text) for part in parts):
            gone.append(name)
    assert gone == []


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", PAGES[page])
    for path, heading in links:
        assert (folder / path).exists(), path
        if heading:
            heads = re.findall(r"^#+ (.*)$", (folder / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads
            }


def test_figures_and_tables_are_those_of_the_result_files() -> None:
    done = subprocess.run(
        [sys.executable, "docs/figures/build.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}; make figures draws them anew"


def commands_of(page: str) -> list[list[str]]:
    """The words of each nano-coder and nano-rl command in the code blocks of a page, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match(r"nano-(coder|rl) ", line)]


def options_of(words: list[str]) -> tuple[set[str], list[str]]:
    """The options of the command that the words call, and the words behind its name."""
    command: Any = {"nano-coder": coder.cli, "nano-rl": rl.cli}[words[0]]
    command, rest = typer.main.get_command(command), words[1:]
    while hasattr(command, "load"):
        assert rest, f"no such command: {shlex.join(words)}"
        assert rest[0] in command.targets, f"no such command: {shlex.join(words)}"
        command, rest = command.load(rest[0]), rest[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    return known | {"--help", "-h"}, rest


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_every_option_of_a_command_that_is_shown_exists(page: str) -> None:
    shown = commands_of(page)
    assert len(shown) >= 10
    for words in shown:
        known, rest = options_of(words)
        given = rest[: rest.index("--")] if "--" in rest else rest
        # what `exec` runs has options of its own
        given = given[:1] if words[1] == "exec" else given
        wrong = [
            word for word in given if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known
        ]
        assert wrong == [], shlex.join(words)
