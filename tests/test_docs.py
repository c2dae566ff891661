"""Documentation that can rot is tested: the files it names exist, its commands and queries run."""

import re
from pathlib import Path

import pytest

from nano_coder import cli as coder
from nano_rl import cli as rl
from nano_shared.store import LogStore

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


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


@pytest.mark.parametrize("query", re.findall(r"```sql\n(.*?)```", README, re.DOTALL)[0].strip().split(";\n"))
def test_the_queries_of_the_readme_run(query: str, tmp_path: Path) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        assert store.sql(query.strip().rstrip(";")).rows == []


def test_the_readme_is_true_about_its_license() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
