"""A project's git history in the jail: objects and refs to be read, and nothing else of `.git`."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from executions import limits
from test_cli import Cli, Endpoint, cli, endpoint, hermes, home

from nano_coder.commands.options import history_of
from nano_coder.config import AgentConfig, ProjectFile, configured
from nano_coder.run.git_history import NoHistory, find_history, open_with
from nano_coder.sandbox.protocol import open_sandbox
from nano_shared.store import LogStore
from nano_shared.types import Trajectory

__all__ = ["cli", "endpoint", "home"]
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
LEFT_OUT = "does not see the project's history"
LAST = "two"


def git(folder: Path, *arguments: str, stdin: str = "") -> str:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org", "-c", "protocol.file.allow=always")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True, input=stdin,
        env={**clean, "GIT_CONFIG_GLOBAL": os.devnull},
    ).stdout.strip()  # fmt: skip


def repository(folder: Path, *options: str) -> Path:
    """Two commits of a.py."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main", *options)
    for text, message in (("one\n", "one"), ("one\ntwo\n", LAST)):
        (folder / "a.py").write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", message)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return repository(tmp_path / "project")


class Told:
    """What a run said on stderr, and what its shell saw."""

    def __init__(self, done: subprocess.CompletedProcess[str], run: Trajectory) -> None:
        self.code, self.said, self.run = done.returncode, done.stderr, run
        self.seen = "\n".join(observation.text for turn in run.turns for observation in turn.observations)
        self.left_out = [line for line in done.stderr.splitlines() if LEFT_OUT in line]


class Shell:
    def __init__(self, cli: Cli, endpoint: Endpoint, home: Path) -> None:
        self._cli, self._endpoint, self._home = cli, endpoint, home

    def __call__(self, project: Path, *lines: str, flags: tuple[str, ...] = ()) -> Told:
        """A run of which each turn is a line of shell."""
        turns = [("shell", {"command": line}) for line in lines]
        self._endpoint.script = hermes(*turns, ("submit", {"answer": "ok"}))
        done = self._cli("run", "look", "-C", str(project), *self._endpoint.flags, *flags)
        assert "run: " in done.stdout, done.stderr
        return Told(done, LogStore.open(str(self._home / "log.db")).get("last"))


@pytest.fixture
def shell(cli: Cli, endpoint: Endpoint, home: Path) -> Shell:
    return Shell(cli, endpoint, home)


@pytest.mark.some(1)
@pytest.mark.parametrize("backend", ["ns", "bwrap"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_run_reads_the_history(shell: Shell, project: Path, backend: str, packed: bool) -> None:
    if backend == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap here")
    if packed:
        git(project, "gc", "-q")
    (project / "a.py").write_text("one\ntwo\nthree\n")
    lines = "git log --format=%s; git show --stat --format=; git blame -s a.py; git diff; git status --short"
    told = shell(project, lines, "git branch", flags=("--sandbox", backend))
    assert told.left_out == []
    for expected in ("two\none", "a.py | 1 +", "1) one", "+three", " M a.py", "* main"):
        assert expected in told.seen
    assert told.run
    assert told.run.diff == ""
    assert git(project, "status", "--short") == "M a.py"


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["lfs", "autocrlf", "info attributes", "sparse", "file mode"])
def test_a_clean_tree_is_clean_in_the_jail_and_stays_as_it_is(shell: Shell, project: Path, kind: str) -> None:
    if kind == "lfs":
        git(project, "config", "filter.lfs.clean", "sed 's/.*/pointer/'")
        git(project, "config", "filter.lfs.smudge", "sed 's/.*/contents/'")
        (project / ".gitattributes").write_text("*.bin filter=lfs\n")
        (project / "a.bin").write_text("contents\n")
    elif kind == "autocrlf":
        git(project, "config", "core.autocrlf", "true")
        (project / "a.py").write_bytes(b"one\r\ntwo\r\n")
    elif kind == "info attributes":
        (project / ".git/info/attributes").write_text("*.py text eol=crlf\n")
        (project / "a.py").write_bytes(b"one\r\ntwo\r\n")
    elif kind == "file mode":
        git(project, "config", "core.fileMode", "false")
        (project / "a.py").chmod(0o755)
    else:
        for name in ("in/f", "out/f"):
            (project / name).parent.mkdir()
            (project / name).write_text("f\n")
    git(project, "add", "-A")
    git(project, "commit", "-q", "--allow-empty", "-m", "more")
    if kind == "sparse":
        git(project, "sparse-checkout", "set", "in")
        assert not (project / "out").exists()
    assert git(project, "status", "--short") == ""
    told = shell(
        project, "git status --short; echo done", "git checkout -q . ; git stash -q; git reset -q --hard"
    )
    assert told.left_out == []
    assert told.run.turns[0].observations[0].text == "done"
    assert told.run.diff == ""


def test_a_filter_of_the_project_runs_nowhere_and_no_value_of_its_configuration_is_a_program(
    shell: Shell, project: Path
) -> None:
    with (project / ".git/config").open("a") as file:
        file.write(
            "[core]\n\tfsmonitor = touch x\n\teol = $(touch x)\n\thooksPath = hooks\n\tautocrlf = input\n"
        )
    seen = shell(project, "git config --list").seen
    assert "core.autocrlf=input" in seen
    assert "touch" not in seen
    assert "core.hookspath=/dev/null" in seen


def test_what_a_run_commits_is_gone_with_it(shell: Shell, project: Path) -> None:
    before = sorted(path for path in (project / ".git").rglob("*"))
    told = shell(
        project,
        "echo four > b.py && git add . && git commit -q -m mine && git log --format=%s",
        "git log -1 --format=%s; git checkout -q HEAD~2; cat a.py; git checkout -q main; git stash list",
        "rm -rf .git; touch .git",
        flags=("--check", "test ! -e .git && test ! -e /opt/git && grep -q four b.py"),
    )
    assert "mine\ntwo\none" in told.seen
    assert told.run
    assert told.run.reward == 1
    assert "b.py" in str(told.run.diff)
    assert ".git" not in str(told.run.diff)
    assert sorted(path for path in (project / ".git").rglob("*")) == before


def test_nothing_else_of_the_repository_comes_along(shell: Shell, project: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (project / "more.cfg").write_text("[user]\nname = Included\n")
    for section in (
        f"core.fsmonitor={canary}", "remote.origin.url=https://ann:hunter2@example.org/x",
        "alias.log=!echo alias", "credential.helper=store", "include.path=../more.cfg",
        "filter.x.clean=touch /work/filtered", "diff.external=touch /work/filtered",
    ):  # fmt: skip
        git(project, "config", *section.split("=", 1))
    (project / ".git/info/attributes").write_text("* filter=x\n")
    (project / ".git/hooks/pre-commit").write_text(f"#!/bin/sh\ntouch {canary} /work/hooked\n")
    (project / ".git/hooks/pre-commit").chmod(0o755)
    told = shell(
        project, "git status; git remote -v; git config --list; git diff; git log --format=%s",
        "find .git /opt/git -not -path '*/objects/*' -type f | xargs cat",
        "git commit --allow-empty -m x && git var GIT_AUTHOR_IDENT; ls /work; ls .git /opt/git",
    )  # fmt: skip
    assert "two\none" in told.seen
    assert "user@sandbox" in told.seen
    for word in ("hunter2", "canary", "Included", "alias", "filtered", "hooked", "credential"):
        assert word not in told.seen
    assert not canary.exists()


@pytest.mark.slow
def test_a_worktree_and_a_submodule_are_followed(shell: Shell, project: Path, tmp_path: Path) -> None:
    git(project, "worktree", "add", "-q", "-b", "side", str(tmp_path / "tree"))
    assert "* side" in shell(tmp_path / "tree", "git branch; git log --format=%s").seen
    whole = repository(tmp_path / "whole")
    git(whole, "submodule", "--quiet", "add", str(project), "part")
    told = shell(whole / "part", "git log --format=%s; git status --short")
    assert "two\none" in told.seen
    assert told.left_out == []


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "kind",
    [
        "sha256",
        "shallow",
        "overlay",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("detached", "blobless", "tags")),
    ],
)
def test_other_repositories(shell: Shell, project: Path, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "other"
    match kind:
        case "sha256":
            repository(place, "--object-format=sha256")
        case "detached":
            git(project, "checkout", "-q", "--detach")
            place = project
        case "shallow":
            git(tmp_path, "clone", "-q", "--depth", "1", f"file://{project}", str(place))
        case "blobless":
            git(project, "config", "uploadpack.allowFilter", "true")
            git(tmp_path, "clone", "-q", "--filter=blob:none", f"file://{project}", str(place))
        case "overlay":
            place = project
            (place / "many").mkdir()
            for number in range(500):
                (place / f"many/{number}").write_text(f"{number}\n")
            git(place, "add", "-A")
            git(place, "commit", "-q", "-m", "many")
        case "tags":
            place = project
            git(place, "tag", "-a", "v1", "-m", "v1")
    told = shell(place, "git log --format=%s; git status --short; git tag; git fsck")
    assert told.left_out == []
    assert told.code == 0
    assert LAST in told.seen
    assert "fatal" not in told.seen
    assert " D " not in told.seen
    assert ("one\n" in told.seen) == (kind != "shallow")
    assert ("v1" in told.seen) == (kind == "tags")


SECRET = "5" * 40


def hostile(kind: str, project: Path, tmp_path: Path) -> None:
    """Make the `.git` of a project what a stranger could send."""
    dot, private = project / ".git", repository(tmp_path / "private")
    (tmp_path / "token").write_text(SECRET)
    match kind:
        case "symlink":
            shutil.rmtree(dot)
            dot.symlink_to(private / ".git")
        case "objects":
            shutil.rmtree(dot / "objects")
            (dot / "objects").symlink_to(private / ".git/objects")
        case "alternates":
            (dot / "objects/info/alternates").write_text(f"{private}/.git/objects\n")
        case "fifo":
            shutil.rmtree(dot)
            os.mkfifo(dot)
        case "HEAD" | "packed-refs" | "shallow":
            (dot / kind).unlink(missing_ok=True)
            os.mkfifo(dot / kind)
        case "link":
            (dot / "HEAD").unlink()
            (dot / "HEAD").symlink_to(tmp_path / "token")
        case "file" | "commondir" | "loop" | "nul":
            shutil.rmtree(dot)
            own = project / "own/worktrees/x"
            own.mkdir(parents=True)
            (own / "gitdir").write_text(f"{dot}\n")
            (own / "HEAD").write_text("ref: refs/heads/main\n")
            (own / "commondir").write_text(f"{private}/.git\n")
            (project / "round").symlink_to(project / "round")
            leads = {
                "file": f"{private}/.git",
                "loop": "round/worktrees/x",
                "nul": "a\0b",
                "commondir": str(own),
            }
            dot.write_text(f"gitdir: {leads[kind]}\n")
            if kind == "commondir":
                (project / "own/objects").symlink_to(private / ".git/objects")
                (project / "own/refs").symlink_to(private / ".git/refs")
        case "missing":
            shutil.rmtree(dot / "objects")
            (dot / "objects").mkdir()
        case "large":
            with open(dot / "packed-refs", "wb") as file:
                file.truncate(1 << 40)
        case "name":
            (dot / "HEAD").write_text("ref: refs/heads/../../../token\n")


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "kind",
    ["symlink", "objects", "alternates", "fifo", "HEAD", "packed-refs", "shallow", "link", "file",
     "commondir", "loop", "nul", "missing", "large", "name"],
)  # fmt: skip
def test_a_hostile_repository_costs_a_sentence(
    project: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile(kind, project, tmp_path)
    history = history_of(project, AgentConfig())
    sandbox = open_sandbox()
    jail = open_with(history, sandbox, project, limits()) if history else sandbox.open(project, limits())
    with closing(jail):
        assert b"not a git repository" in jail.run(["git", "log"]).stderr
        assert b"git" not in jail.run(["ls", "/opt"]).stdout
    (said,) = capsys.readouterr().err.splitlines()
    assert LEFT_OUT in said


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["HEAD", "commondir", "missing"])
def test_a_run_in_a_hostile_repository_ends_well(
    shell: Shell, project: Path, tmp_path: Path, kind: str
) -> None:
    hostile(kind, project, tmp_path)
    told = shell(project, "git log; ls -a; ls /opt")
    assert told.code == 0
    assert len(told.left_out) == 1, told.said
    assert "not a git repository" in told.seen
    assert "Traceback" not in told.said


def test_refs_that_lead_out_or_are_none_stay_out(shell: Shell, project: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(SECRET)
    heads = project / ".git/refs/heads"
    (heads / "linked").symlink_to(tmp_path / "token")
    (heads / "folder").symlink_to(tmp_path)
    os.mkfifo(heads / "pipe")
    (heads / "text").write_text("no hash\n")
    (heads / "a\nb").write_text(git(project, "rev-parse", "HEAD"))
    told = shell(project, "git log --all --format=%s; cat .git/packed-refs; git branch")
    assert (told.left_out, SECRET in told.seen) == ([], False)
    assert "two\none" in told.seen
    assert "* main" in told.seen
    for word in ("linked", "pipe", "text", "b\n"):
        assert f"refs/heads/{word}" not in told.seen


def test_too_many_refs_are_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_coder.run.git_history._MOST_REFS", 3)
    for number in range(5):
        git(project, "branch", f"b{number}")
    with pytest.raises(NoHistory, match="pack-refs"):
        find_history(project)


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", ["bomb", "pipe", "private", "gone"])
def test_objects_that_git_cannot_read_leave_a_usual_jail(
    project: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    match kind:
        case "bomb":  # ten thousand million files
            monkeypatch.setattr("nano_coder.run.git_history._SETUP_S", 1.0)
            tree = git(project, "rev-parse", "HEAD^{tree}")
            for _ in range(10):
                tree = git(project, "mktree", stdin="".join(f"040000 tree {tree}\t{n}\n" for n in range(10)))
            git(project, "update-ref", "refs/heads/main", git(project, "commit-tree", tree, "-m", "bomb"))
        case "pipe":
            monkeypatch.setattr("nano_coder.run.git_history._SETUP_S", 1.0)
            name = f"pack-{'1' * 40}"
            os.mkfifo(project / f".git/objects/pack/{name}.idx")
            (project / f".git/objects/pack/{name}.pack").write_bytes(b"PACK")
        case "private":
            if os.geteuid() != 0:
                pytest.skip("a user's jails read what the user reads")
            for folder in (project / ".git/objects").iterdir():
                folder.chmod(0o700)
    history = find_history(project)
    assert history
    if kind == "gone":
        shutil.rmtree(project / ".git")
    with closing(open_with(history, open_sandbox(), project, limits())) as jail:
        assert jail.run(["ls", "-A"]).stdout == b"a.py\n"
    (said,) = capsys.readouterr().err.splitlines()
    assert LEFT_OUT in said


def test_a_plain_folder_has_no_history_and_no_sentence(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/a.py").write_text("one\n")
    told = shell(tmp_path / "plain", "git log")
    assert told.left_out == []
    assert "not a git repository" in told.seen


def test_a_branch_without_a_commit_is_told(shell: Shell, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q", "-b", "main")
    (sentence,) = shell(empty, "git status -sb").left_out
    assert "before the first one" in sentence


def test_a_part_of_a_repository_is_told(shell: Shell, project: Path) -> None:
    (project / "package").mkdir()
    (project / "package/b.py").write_text("one\n")
    (sentence,) = shell(project / "package", "git log").left_out
    assert f"-C {project} shows it" in sentence


def test_refs_in_another_format_are_told(shell: Shell, project: Path) -> None:
    (project / ".git/reftable").mkdir()
    (project / ".git/HEAD").write_text("ref: refs/heads/.invalid\n")
    (sentence,) = shell(project, "git log").left_out
    assert "reftable" in sentence


def test_a_repository_inside_the_jail_is_the_programs_own(shell: Shell, project: Path) -> None:
    told = shell(project, "mkdir /tmp/r && cd /tmp/r && git init -q && git status && cd / && git log")
    assert "No commits yet" in told.seen
    assert "not a git repository" in told.seen


@pytest.mark.slow
def test_what_is_excluded_keeps_the_history_out_unless_the_user_says(
    shell: Shell, project: Path, tmp_path: Path, home: Path
) -> None:
    (project / "secrets").mkdir()
    (project / "secrets/token").write_text("hunter2\n")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "secret")
    look = "git show HEAD:secrets/token"
    hidden = shell(project, look, flags=("--set", "exclude=secrets"))
    assert len(hidden.left_out) == 1
    assert "hunter2" not in hidden.seen
    (home / "config/nano").mkdir(parents=True)
    (home / "config/nano/config.toml").write_text("git = true\n")
    assert "hunter2" in shell(project, look, flags=("--set", "exclude=secrets")).seen
    (home / "config/nano/config.toml").write_text("git = false\n")
    off = shell(project, look)
    assert off.left_out == []
    assert "not a git repository" in off.seen


@pytest.mark.parametrize(("users", "theirs", "kept"), [(None, False, False), (True, False, False),
                                                       (None, True, None), (False, True, False)])  # fmt: skip
def test_a_strangers_file_turns_it_off_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: bool | None, theirs: bool, kept: bool | None
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("NANO_GIT", raising=False)
    if users is not None:
        (tmp_path / "nano").mkdir()
        (tmp_path / "nano/config.toml").write_text(f"git = {str(users).lower()}\n")
    content = f"git = {str(theirs).lower()}\n".encode()
    file = ProjectFile(path=tmp_path / "nano.toml", content=content, trusted=False)
    found = configured({}, file)
    assert found.config.git is kept
    assert ("git" in found.ignored) == (theirs and kept is not True)
