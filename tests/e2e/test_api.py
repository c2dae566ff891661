"""Names and examples of docs/extending.md, "From Python": defined where they are imported from, and run."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from integration.tiny_model import build_tiny

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text().partition("## From Python")[2]
MODULES = re.findall(r"^- `((nano_\w+)\.[\w.]+)`: (.*)$", PAGE, re.MULTILINE)
NAMES = {module: re.findall(r"`(\w+)`", names) for module, _, names in MODULES}
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_there_are_at_most_thirty_names_of_the_runtime_and_twenty_of_the_trainer() -> None:
    for package, most in (("nano_coder", 30), ("nano_rl", 20)):
        assert 0 < sum(len(NAMES[module]) for module, owner, _ in MODULES if owner == package) <= most


@pytest.mark.parametrize("module", NAMES)
def test_names_are_defined_where_they_are_imported_from(module: str) -> None:
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    defined |= {
        target.id
        for node in ast.walk(tree)  # one that depends on what is installed is in a branch
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert set(NAMES[module]) <= defined


def test_examples_import_public_names_alone() -> None:
    for code in EXAMPLES:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("nano_coder", "nano_rl")):
                assert {alias.name for alias in node.names} <= set(NAMES[str(node.module)])


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    tiny = build_tiny(tmp_path / "tiny", [PAGE], vocab_size=512, hidden=64, layers=2)
    told: dict[str, object] = {}
    for code in EXAMPLES:
        if named := re.match(r"# (\w+\.py)\n", code):
            Path(named[1]).write_text(code)
        else:
            exec(code.replace('"shipped"', f'"{tiny}"'), told)
    printed = capsys.readouterr().out.splitlines()
    assert "1.0" in printed, "the folder was mended by hand"
    assert any("has ended" in line or "ended" in line for line in printed)
    assert "compact-1+fare" in printed
    assert printed[-1] == "./mine"
    assert (tmp_path / "mine" / "adapter_model.safetensors").is_file()
