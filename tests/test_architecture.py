"""The layout is the architecture: which package may import which, and how light the light half is."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "nano_shared": ROOT / "shared/nano_shared",
    "nano_coder": ROOT / "nano_coder",
    "nano_rl": ROOT / "nano_rl",
}
PLUGINS = {folder.name: folder for folder in (ROOT / "plugins").glob("*/nano_*")}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def modules() -> list[tuple[str, Path]]:
    """Those of the core and of plug-ins."""
    both = PACKAGES | PLUGINS
    return [(package, path) for package, folder in both.items() for path in sorted(folder.rglob("*.py"))]


def test_imports_point_one_way_leaves_are_leaves_and_folders_form_no_circle() -> None:
    """The contracts are in pyproject.toml."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nobody_imports_the_packages_of_the_repository_that_are_not_installed() -> None:
    for package, path in modules():
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"integration", "shared", "tests", "benchmarks", "examples"}, (package, path)


@pytest.mark.slow
def test_whoever_wants_the_losses_alone_loads_few_of_our_modules() -> None:
    code = "import sys, nano_rl.learn.train_step; print(*[m for m in sys.modules if m.startswith('nano_')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert len(loaded) <= 90
    assert not [module for module in loaded if module.startswith("nano_coder")]


def test_the_contract_and_the_runtime_import_no_torch() -> None:
    code = "import sys, nano_coder, nano_shared, nano_coder.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_place_turns_any_exception_into_data() -> None:
    broad = [
        f"{path.name}:{node.lineno}"
        for _, path in modules()
        # these run a program of others, which may raise anything, SystemExit too
        if path.name not in ("warm_python.py", "session.py") and path.parent.name != "inside"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
    ]
    # the grading of what a policy left always gives a verdict; code of strangers may raise anything,
    # and so may the client of MCP servers, by what they send
    ours = ["connection.py", *4 * ["extension_points.py"], "grade.py"]
    assert sorted(place.partition(":")[0] for place in broad) == ours


def test_no_child_interpreter_on_the_host_imports_from_the_current_folder() -> None:
    """A project's `json.py` would run outside every jail."""
    own = []
    for _, path in modules():
        tree = ast.parse(path.read_text())
        commands = [node.elts[0] for node in ast.walk(tree) if isinstance(node, ast.List) and node.elts]
        own += [
            path.name
            for first in commands
            if isinstance(first, ast.Attribute) and ast.unparse(first) == "sys.executable"
        ]
        spawns = any(
            isinstance(n, ast.Constant) and n.value in ("spawn", "forkserver") for n in ast.walk(tree)
        )
        if spawns or "multiprocessing.Process" in path.read_text():
            assert "nano_shared.process" in imports(path), path
    # the grader of a task of Harbor runs in a container of others
    assert sorted(set(own)) == ["grade.py", "process.py"]


def wheel_names(project: Path, folder: Path) -> set[str]:
    (wheel,) = WheelBuilder(str(project)).build(directory=str(folder))
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    tops = {name.split("/")[0] for name in wheel_names(ROOT, tmp_path)}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_of_the_viewer_holds_its_page(tmp_path: Path) -> None:
    names = wheel_names(ROOT / "plugins/view", tmp_path)
    assert {f"nano_view/view.{kind}" for kind in ("html", "css", "js")} <= names


def test_what_is_pinned_installs_on_the_oldest_python_that_is_allowed() -> None:
    """Debian 12 has 3.11.2; a pin that wants a later one makes `make run` end at the installation."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].strip(">=")
    wanted = {canonicalize_name(one.name): one.metadata["Requires-Python"] for one in distributions()}
    assert len(pinned & set(wanted)) > 150
    refusing = {n for n in pinned & set(wanted) if f"{oldest}.0" not in SpecifierSet(wanted[n] or "")}
    assert refusing == set()
