"""Git history in the jail: the project's objects, read-only, under a newly written repository.

Only objects, HEAD and refs of the project's `.git` are used; no hook, filter, remote, credential or include.
Its files may be untrusted: they are read as text here, and git itself runs only in the jail.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nano_coder.sandbox.launcher.files import OURS
from nano_coder.sandbox.protocol import Jail, Sandbox, SupportsMounts
from nano_shared.errors import SandboxError, UsageError
from nano_shared.files import NotReadable, read_regular
from nano_shared.printable import printable
from nano_shared.types import Limits

OBJECTS = "/opt/git/objects"
"""path of the project's objects in the jail"""
_MOST_BYTES = 8 << 20
_MOST_REFS = 20_000
_LONGEST_REF = 4096
_SETUP_S = 30.0
_HASH = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF = re.compile(r"refs/(?!.*(?:\.\.|//|/\.|@\{|\.lock(?:/|\Z)))[^\x00-\x20\x7f~^:?*\[\\]+(?<![./])")
_WORKTREE = re.compile(r"^\s*worktree\s*=\s*(.+?)\s*$", re.MULTILINE)
# bounded windows: the memory that git maps must not grow with the size of a pack
_CONFIG = """[core]
repositoryformatversion = {version}
bare = false
hooksPath = /dev/null
fsmonitor = false
packedGitWindowSize = 8m
packedGitLimit = 64m
deltaBaseCacheLimit = 32m
bigFileThreshold = 32m
[gc]
auto = 0
[maintenance]
auto = false
[user]
name = user
email = user@sandbox
[extensions]
{extensions}
"""
_DECIDING = frozenset(
    ("autocrlf", "eol", "filemode", "ignorecase", "precomposeunicode", "sparsecheckout", "sparsecheckoutcone")
)
_VALUES = frozenset(("true", "false", "input", "lf", "crlf", "native", "yes", "no", "on", "off"))
_SET_UP = """
import json, os, subprocess, sys
for name, text in json.load(sys.stdin).items():
    path = os.path.join(".git", name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
os.makedirs(".git/refs", exist_ok=True)
def git(*argv):
    return subprocess.run(["git", *argv], stdout=subprocess.DEVNULL).returncode
def listed(*argv, given=b""):
    return subprocess.run(["git", *argv], input=given, capture_output=True).stdout
def leave_alone(paths):
    if paths:
        names = b"".join(path + b"\\0" for path in paths)
        listed("update-index", "-z", "--skip-worktree", "--stdin", given=names)
try:
    code = git("read-tree", "HEAD")
except OSError as problem:
    sys.exit(f"git does not start: {problem.strerror}")
if code == 0:
    # no filter of the user's runs here: its paths would look changed, and a checkout would write pointers
    names = listed("ls-files", "-z")
    found = listed("check-attr", "-z", "--stdin", "filter", given=names).split(b"\\0")
    leave_alone([p for p, value in zip(found[::3], found[2::3]) if value not in (b"unspecified", b"unset")])
    if listed("config", "core.sparseCheckout").strip() == b"true":
        leave_alone(listed("ls-files", "-d", "-z").split(b"\\0")[:-1])
if code == 0 and os.path.getsize(".git/index") > 64 << 20:
    sys.exit("the index is too large")
sys.exit(code)
"""


class NoHistory(Exception):
    """The repository's history cannot be shown."""


@dataclass(frozen=True, slots=True)
class GitHistory:
    objects: Path
    files: dict[str, str]
    """name -> text of the files of the jail's repository"""


def find_history(project: Path) -> GitHistory | None:
    """The history that a run may see; None if the directory is in no repository. Raises NoHistory for one
    below the root of a repository, and for a repository that borrows objects, leads elsewhere or is too large
    to read."""
    if not os.path.lexists(project / ".git"):
        for above in project.resolve().parents:
            if os.path.exists(above / ".git" / "HEAD") or os.path.isfile(above / ".git"):
                raise NoHistory(f"{project} is a part of the repository at {above}; -C {above} shows it")
        return None
    try:
        mode = (project / ".git").lstat().st_mode
        own, common = _folders(project, mode)
        objects = common / "objects"
        info = objects.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), project.stat().st_uid):
            raise NoHistory("its objects are no directory of your own")
        if _read(common, "objects/info/alternates").strip():
            raise NoHistory("it borrows objects of another repository (git repack -a -d copies them)")
        if (common / "reftable").exists():
            raise NoHistory("its refs are in reftable files (git refs migrate --ref-format=files)")
        found = _synthetic_history(own, common)
        if found is not None:
            # attributes and the sparse checkout of the project alone
            texts = (("info/attributes", common), ("info/sparse-checkout", own))
            found.files.update((name, text) for name, of in texts if (text := _read(of, name)))
            found.files["config"] += _deciding_keys(own, common)
        return found
    except FileNotFoundError:
        return None
    except (OSError, NotReadable, ValueError) as problem:  # a path with a NUL byte
        raise NoHistory(f"it cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def _folders(project: Path, mode: int) -> tuple[Path, Path]:
    """The repository's own folder, and the one that it shares with other worktrees. A `.git` file may name
    any repository of the user: it is followed only to one that names the project back."""
    git = project / ".git"
    if stat.S_ISDIR(mode):
        return git, git
    if not stat.S_ISREG(mode):
        raise NoHistory("its .git is neither a directory nor a file")
    own = Path(os.path.realpath(project / _read(project, ".git").removeprefix("gitdir:").strip()))
    if own.parent.name == "worktrees":
        common, named = own.parent.parent, _read(own, "gitdir").strip().removesuffix(".git")
    else:
        common, values = own, _WORKTREE.findall(_read(own, "config"))
        named = values[-1].strip('"') if values else ""
    if not named or os.path.realpath(own / named) != os.path.realpath(project):
        raise NoHistory("its .git leads to a repository that does not name this directory")
    return own, common


def _synthetic_history(own: Path, common: Path) -> GitHistory | None:
    """None for a folder that is no repository, without HEAD and refs."""
    head, refs = _read(own, "HEAD").strip(), dict(_refs(common))
    if not head and not refs:
        return None
    target = head.removeprefix("ref:").strip()
    commit = refs.get(target, target)
    if not _HASH.fullmatch(commit):
        raise NoHistory("its HEAD names no commit, as before the first one")
    sha256 = len(commit) == 64
    same = {name: value for name, value in sorted(refs.items()) if len(value) == (64 if sha256 else 40)}
    files = {
        "config": _CONFIG.format(version=int(sha256), extensions="objectformat = sha256" if sha256 else ""),
        "HEAD": f"ref: {target}\n" if target in refs else f"{target}\n",
        "packed-refs": "".join(f"{value} {name}\n" for name, value in same.items()),
        "objects/info/alternates": f"{OBJECTS}\n",
        "info/exclude": f"{_read(common, 'info/exclude')}\n{OURS}\n",
    }
    if grafts := [line for line in _read(common, "shallow").split() if _HASH.fullmatch(line)]:
        files["shallow"] = "".join(f"{line}\n" for line in grafts)
    return GitHistory(Path(os.path.realpath(common / "objects")), files)


def _deciding_keys(own: Path, common: Path) -> str:
    """The keys of the user's and the project's configuration that say what is unchanged: values from a list,
    so that none of them names a program."""
    home = Path(os.path.expanduser("~"))
    texts = [_outside(home / ".config/git/config"), _outside(home / ".gitconfig")]
    texts += [_read(common, "config"), _read(own, "config.worktree")]
    kept = {}
    for text in texts:
        for section, body in re.findall(r"^\[([^\]]*)\]([^\[]*)", text, re.MULTILINE):
            of_core = section.strip().lower() == "core"
            for key, value in re.findall(r"^\s*(\w+)\s*=\s*(\w+)\s*$", body, re.MULTILINE):
                if of_core and key.lower() in _DECIDING and value.lower() in _VALUES:
                    kept[key] = value
    return "[core]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items())


def _outside(path: Path) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8", "replace")
    except (OSError, NotReadable):
        return ""


def _refs(common: Path) -> Iterator[tuple[str, str]]:
    """Ref names and hashes, later sources override earlier ones; invalid names are left out."""
    for line in _read(common, "packed-refs").split("\n"):
        value, _, name = line.partition(" ")
        if _HASH.fullmatch(value) and _REF.fullmatch(name):
            yield name, value
    seen = 0
    for folder, folders, names in os.walk(_within(common, "refs")):
        seen += len(folders) + len(names)
        if seen > _MOST_REFS:
            raise NoHistory(f"it has more than {_MOST_REFS} loose refs (git pack-refs --all packs them)")
        for path in (Path(folder, name) for name in names):
            name = os.fspath(path.relative_to(common))
            if _REF.fullmatch(name) and stat.S_ISREG(path.lstat().st_mode):
                value = _read(common, name, _LONGEST_REF).strip()
                if _HASH.fullmatch(value):
                    yield name, value


def _read(folder: Path, name: str, most: int = _MOST_BYTES) -> str:
    """The text of a file; empty if there is none."""
    try:
        return read_regular(_within(folder, name), most).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ""


def _within(folder: Path, name: str) -> Path:
    """Raises NoHistory if a link leads out of the repository."""
    path = folder / name
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
        raise NoHistory(f"{name} in its .git is a link")
    return path


def open_with(history: GitHistory, sandbox: Sandbox, workspace: Path, limits: Limits) -> Jail:
    """A jail on the workspace with the history; without it, and a message on stderr, if that fails."""
    try:
        return history_jail(history, sandbox, workspace, limits)
    except NoHistory as reason:
        say_left_out(str(reason))
    return sandbox.open(workspace, limits)


def history_jail(history: GitHistory, sandbox: Sandbox, workspace: Path | None, limits: Limits) -> Jail:
    """A jail on the workspace with the history. Raises NoHistory if git cannot read it there."""
    if not isinstance(sandbox, SupportsMounts):
        raise NoHistory(f"the sandbox {sandbox.name!r} does not show it")
    try:
        with ExitStack() as stack:
            jail = sandbox.with_mount(history.objects, OBJECTS).open(workspace, limits)
            stack.callback(jail.close)
            if (problem := _set_up(jail, history)) is None:
                stack.pop_all()
                return jail
    except (SandboxError, UsageError) as failed:
        problem = str(failed)
    raise NoHistory(f"git cannot read it in the jail ({problem})")


def _set_up(jail: Jail, history: GitHistory) -> str | None:
    """Create the repository in the jail. Returns an error message, or None."""
    stdin = json.dumps(history.files).encode()
    result = jail.run_python(_SET_UP, isolated=True, stdin=stdin, timeout=_SETUP_S)
    if result.ok:
        return None
    if result.timed_out:
        return f"it took more than {_SETUP_S:g} s"
    said = result.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
    return said[-1] if said else f"exit code {result.exit_code}, signal {result.signal}"


def say_left_out(reason: str) -> None:
    print(printable(f"git: the run does not see the project's history: {reason}"), file=sys.stderr)
