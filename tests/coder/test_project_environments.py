"""A project's environment in the jail: scripts start, and editable installs find the copy that is edited."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nano_coder.sandbox.protocol import Jail, open_sandbox
from nano_shared.types import Limits

_FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {{'package': '{project}/src/package/__init__.py'}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return spec_from_file_location(name, MAPPING[name]) if name in MAPPING else None
sys.meta_path.append(Finder)
"""
HOOKS = {
    "absolute path": {"package.pth": "{project}/src\n"},
    "relative path": {"package.pth": "../../../../src\n"},
    "egg link": {"easy-install.pth": "{project}/src\n", "package.egg-link": "{project}/src\n../"},
    "import hook": {
        "__editable___package_finder.py": _FINDER,
        "package.pth": "import __editable___package_finder\n",
    },
}
SCRIPT = "import package; print(package.VALUE)\n"


@pytest.fixture(params=["/tmp", "/var/tmp"])
def project(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A project with an environment, where the jail has a folder of its own, and where it has none."""
    with tempfile.TemporaryDirectory(dir=request.param) as name:
        folder = Path(name) / "project"
        (folder / "src/package").mkdir(parents=True)
        (folder / "src/package/__init__.py").write_text("VALUE = 'of the host'\n")
        program = [sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")]
        subprocess.run(program, check=True)
        _scripts(folder / ".venv/bin")
        yield folder


def _scripts(folder: Path) -> None:
    long = f"#!/bin/sh\n'''exec' \"{folder}/python\" \"$0\" \"$@\"\n' '''\n"
    for name, first in (("tool", f"#!{folder}/python\n"), ("longtool", long)):
        (folder / name).write_text(first + SCRIPT)
        (folder / name).chmod(0o755)


def _install(project: Path, hooks: dict[str, str]) -> None:
    (site,) = (project / ".venv/lib").glob("python3*/site-packages")
    for name, text in hooks.items():
        (site / name).write_text(text.format(project=project))


def _opened(project: Path) -> Jail:
    sandbox = open_sandbox(python=str(project / ".venv/bin/python"), project=project)
    jail = sandbox.open(None, Limits(tool_seconds=60))
    jail.write("src/package/__init__.py", b"VALUE = 'edited'\n")
    return jail


@pytest.mark.some(3)
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_scripts_and_editable_installs_use_the_copy(project: Path, hooks: dict[str, str]) -> None:
    _install(project, hooks)
    environment = project / ".venv"
    lines = (
        "tool", "longtool", ".venv/bin/tool", f"{environment}/bin/tool",
        f". {environment}/bin/activate; python {environment}/bin/tool",
    )  # fmt: skip
    with closing(_opened(project)) as jail:
        for line in lines:
            done = jail.run(["sh", "-c", line])
            assert (done.stdout, done.stderr) == (b"edited\n", b""), line


def test_what_the_agent_removes_of_the_links_is_there_again(project: Path) -> None:
    _install(project, HOOKS["absolute path"])
    with closing(_opened(project)) as jail:
        assert jail.run(["sh", "-c", "rm -rf /work/.venv /tmp/*; tool"]).stdout == b"edited\n"
        assert jail.run([".venv/bin/tool"]).stdout == b"edited\n"


def test_a_folder_outside_the_project_is_told_and_not_shown(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = project.parent / "other"
    other.mkdir()
    (other / "secret.py").touch()
    _install(project, {"other.pth": f"{other}\n"})
    with closing(_opened(project)) as jail:
        assert not jail.run(["ls", str(other)]).ok
    assert f"{other}, from which other.pth" in capsys.readouterr().err


def test_a_link_of_an_environment_is_not_read_for_it(project: Path) -> None:
    secret = project.parent / "secret"
    secret.write_text(f"{project} and a password\n")
    (site,) = (project / ".venv/lib").glob("python3*/site-packages")
    (site / "stolen.pth").symlink_to(secret)
    (project / ".venv/bin/stolen").symlink_to(secret)
    with closing(_opened(project)) as jail:
        found = jail.run(["grep", "-rs", "a password", "/opt", "/tmp", "/work", str(project)])
    assert found.stdout == b""
