"""Documentation that can rot is tested: the files it names exist, its commands and queries run."""

import functools
import itertools
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
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "plugins").glob("*/README.md")),
        ROOT / "examples" / "from_scratch" / "README.md",
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


def test_every_file_of_the_tree_in_concepts_exists() -> None:
    tree = PAGES["docs/concepts.md"].split("## Where things are")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / name
        assert (folder if folder == ROOT / name else folder / name).exists(), name


QUERIES = re.findall(r"```sql\n(.*?)```", PAGES["docs/concepts.md"], re.DOTALL)[0].strip().split(";\n")


@pytest.mark.parametrize("query", QUERIES)
def test_the_queries_of_concepts_run(query: str, tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        assert store.sql(query.strip().rstrip(";")).rows == []


def test_the_readme_is_true_about_its_license() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_a_page_names_exists(page: str) -> None:
    """`nano_rl/learn/loss.py` from the root; `launcher/archive.py` or `engine.py` somewhere below it."""
    named = re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w", PAGES[page])
    gone = [path for path in named if not (ROOT / path.removesuffix(".")).exists()]
    modules = re.findall(r"`([\w/]+\.py)(?:::\w+)?`", PAGES[page])
    gone += [path for path in modules if not any(file.endswith(f"/{path}") for file in files())]
    assert gone == []


@pytest.mark.parametrize("page", PAGES)
def test_every_module_name_of_a_page_exists(page: str) -> None:
    """`nano_rl.learn.train_step.Updater`: a module, and names that its text holds."""
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
        assert not heading or heading in headings(folder / path), f"{path}#{heading}"


def headings(page: Path) -> set[str]:
    """The anchors of a page."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).strip().lower().replace(" ", "-") for head in heads}


def test_pages_and_anchors_that_code_names_exist() -> None:
    for file in files():
        if file.endswith((".py", ".toml")) and not file.startswith("/tests/"):
            text = (ROOT / file[1:]).read_text(encoding="utf-8")
            for page, anchor in re.findall(r"(?<![\w/.])docs/(\w+\.md)(?:#([\w-]+))?", text):
                assert (ROOT / "docs" / page).exists(), f"{file}: docs/{page}"
                assert not anchor or anchor in headings(ROOT / "docs" / page), f"{file}: docs/{page}#{anchor}"


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
    """The words of each nano-coder and nano-rl command in the code of a page, without comments."""
    text = PAGES[page].replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```|((?:^ {4}.*\n)+)", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in "".join(block).splitlines()]
    return [
        shlex.split(line.partition(" #")[0], comments=True)
        for line in lines
        if re.match(r"nano-(coder|rl) ", line)
    ]


def called(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words call, and the words behind its name."""
    command: Any = {"nano-coder": coder.cli, "nano-rl": rl.cli}[words[0]]
    command, rest = typer.main.get_command(command), words[1:]
    while hasattr(command, "load"):
        assert rest, f"no such command: {shlex.join(words)}"
        assert rest[0] in command.targets, f"no such command: {shlex.join(words)}"
        command, rest = command.load(rest[0]), rest[1:]
    return command, rest


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_shown_exists_with_its_options_and_settings(page: str) -> None:
    for words in commands_of(page):
        command, rest = called(words)
        given = rest[: rest.index("--")] if "--" in rest else rest
        # what `exec` runs has options of its own
        given = [word.strip("[]|") for word in (given[:1] if words[1] == "exec" else given)]
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        wrong = {w.partition("=")[0] for w in given if re.match(r"--?[a-z]", w)} - known - {"--help", "-h"}
        assert wrong == set(), shlex.join(words)
        set_here = {word.partition("=")[0] for option, word in itertools.pairwise(given) if option == "--set"}
        assert set_here <= set(command.settings), shlex.join(words)


def test_the_guide_and_the_readme_show_commands() -> None:
    assert all(len(commands_of(page)) >= 5 for page in ("README.md", "docs/guide.md"))
