"""The layout is the architecture: which package may import which, and how light the light half is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "nano_shared": ROOT / "shared/nano_shared",
    "nano_coder": ROOT / "nano_coder",
    "nano_rl": ROOT / "nano_rl",
}
OURS = {*PACKAGES, "integration", "shared", "tests", "benchmarks"}
MAY_IMPORT = {
    "nano_shared": {"nano_shared"},
    "nano_coder": {"nano_shared", "nano_coder"},
    "nano_rl": {"nano_shared", "nano_coder", "nano_rl"},
}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def modules() -> list[tuple[str, Path]]:
    return [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]


@pytest.mark.parametrize(("package", "path"), modules(), ids=lambda value: Path(value).name if value else "")
def test_imports_point_one_way(package: str, path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert roots & OURS <= MAY_IMPORT[package]


def test_the_trainer_enters_the_runtime_by_one_door() -> None:
    for package, path in modules():
        if package == "nano_rl":
            inner = {name for name in imports(path) if name.startswith("nano_coder")}
            assert inner <= {"nano_coder.runtime"}, f"{path.name} imports {inner}"


def test_the_contract_and_the_runtime_import_no_torch() -> None:
    code = "import sys, nano_coder, nano_shared, nano_coder.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_place_turns_any_exception_into_data() -> None:
    broad = [
        f"{path.name}:{node.lineno}"
        for _, path in modules()
        # these run a program of others, which may raise anything, SystemExit too
        if path.name not in ("child.py", "interpret.py", "repl.py") and path.parent.name != "inside"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
    ]
    # the grading of what a policy left: whatever that raises, there is a verdict
    assert [place.partition(":")[0] for place in broad] == ["grade.py"]


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    import zipfile

    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
