"""One log of several people: whose runs are whose, which is the last, what others see and may learn from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from log_values import a_run, a_turn, a_verdict
from test_database import oldest_log

from nano_coder.config import usual_name
from nano_shared.errors import LogError
from nano_shared.logged_run import LoggedRun
from nano_shared.owners import User, project_of
from nano_shared.run_facts import RunFilter
from nano_shared.store import LogStore
from nano_shared.types import Share

PEOPLE = [f"p{number}@host" for number in range(10)]


def as_user(log: str | Path, name: str, share: Share = Share.TEAM, directory: str = "/shop") -> LogStore:
    return LogStore.open(log, user=User(name=name, share=share, directory=directory))


def test_ten_people_share_a_log(log: str) -> None:
    consents = dict(zip(PEOPLE, list(Share) * 4, strict=False))
    for number, name in enumerate(PEOPLE):
        with as_user(log, name, consents[name]) as store:
            for folder in ("/shop", "/other"):
                run = a_run(f"{name}{folder}", started=number + (folder == "/other"), directory=folder)
                store.append(run.model_copy(update={"turns": (a_turn(),), "verdict": a_verdict(1.0)}))
    for name in PEOPLE:
        with as_user(log, name) as store:
            assert store.resolve("last") == f"{name}/shop"
            assert [run.id for run in store.runs(by=None)] == [f"{name}/shop", f"{name}/other"]
            seen = {run.owner for run in store.runs()}
            assert seen == {who for who in PEOPLE if who == name or consents[who] is not Share.NEVER}
            taught = {run.owner for run in store.facts() if not run.withheld}
            assert taught == {who for who in PEOPLE if who == name or consents[who] is Share.TRAIN}
            assert {run.owner for run in store.facts()} == seen
    with as_user(log, PEOPLE[1]) as store:
        assert [run.id for run in store.runs(by=PEOPLE[2])] == [f"{PEOPLE[2]}/shop", f"{PEOPLE[2]}/other"]
        assert store.runs(by=PEOPLE[0]) == []
        for hidden in (f"{PEOPLE[0]}/shop", "p0"):
            with pytest.raises(LogError, match="no run"):
                store.resolve(hidden)
        assert store.resolve("p2@host/s") == f"{PEOPLE[2]}/shop"


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([], "holds no runs yet"),
        ([("me", "/other")], "no run of yours in /shop; your newest is r0 in /other: name it"),
        ([("me", None)], "your newest is r0 of no directory"),
        ([("ann@a", "/shop")], "no run of yours in /shop; the newest, of ann@a, is r0 in /shop: name it"),
        ([("me", "/other"), ("ann@a", "/shop")], "your newest is r0 in /other"),
    ],
)
def test_last_says_what_there_is_instead(log: str, others: list[tuple[str, str]], says: str) -> None:
    for number, (name, folder) in enumerate(others):
        with as_user(log, name) as store:
            store.begin(a_run(f"r{number}", started=float(number), directory=folder))
    with as_user(log, "me") as store, pytest.raises(LogError) as refused:
        store.resolve("last")
    assert says in str(refused.value)


def test_the_runs_of_an_older_log_are_everybodys_own(tmp_path: Path) -> None:
    oldest_log(tmp_path / "log.db")
    with as_user(tmp_path / "log.db", "ann@a") as store:
        assert (store.get("run1").owner, store.get("run1").share) == (None, None)
        assert [run.id for run in store.runs(by=None)] == ["run1"]
        assert not any(run.withheld for run in store.facts())


def test_a_log_before_owners_keeps_its_seals(log: str) -> None:
    with LogStore.open(log) as store:
        store.append(a_run("old", turns=(a_turn(),), verdict=a_verdict(1.0)))
    with as_user(log, "ann@a") as store:
        store.append(a_run("new", turns=(a_turn(),), verdict=a_verdict(1.0)))
        assert {run.id: run.sealed for run in store.facts()} == {"old": True, "new": True}


def test_an_import_keeps_the_owner_or_is_the_importers(log: str) -> None:
    anns = a_run("r1", owner="ann@a", share=Share.NEVER, project="git:1", directory="/shop")
    runs = [LoggedRun(trajectory=run) for run in (anns, a_run("r2"))]
    with as_user(log, "cem@c", Share.TRAIN) as store:
        store.merge(lambda: runs)
        assert (store.merge(lambda: runs).known, store.merge(lambda: runs).added) == (2, 0)
        assert (store.get("r2").owner, store.get("r2").share) == ("cem@c", Share.TRAIN)
        with pytest.raises(LogError, match="no run"):
            store.get("r1")
    with as_user(log, "ann@a") as store:
        assert store.get("r1") == anns.model_copy(update={"directory": None})


def test_ids_and_facts_hide_what_is_shared_with_nobody(log: str) -> None:
    with as_user(log, "ann@a", Share.NEVER) as store:
        store.append(a_run("r1", turns=(a_turn(),)))
    with as_user(log, "cem@c") as store:
        assert (store.ids(), list(store.facts(RunFilter(runs=("r1",)))), list(store.trajectories())) == (
            [],
            [],
            [],
        )


# ---------------------------------------------------------------------------------------- projects


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_project_keeps_its_identity_where_it_moves_and_is_cloned(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    (shop / "src").mkdir(parents=True)
    assert project_of(str(shop)) == str(shop)
    git(shop, "init", "-q")
    (shop / "a.py").write_text("x\n")
    project_of.cache_clear()
    assert project_of(str(shop / "src")) == str(shop / "src"), "before the first commit"
    git(shop, "add", ".")
    git(shop, "commit", "-qm", "one")
    first = git(shop, "rev-parse", "HEAD")
    git(shop, "commit", "-qm", "two", "--allow-empty")
    git(tmp_path, "clone", "-q", str(shop), "clone")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{shop}", "shallow")
    shop.rename(tmp_path / "moved")
    project_of.cache_clear()
    for place in ("moved", "moved/src", "clone"):
        (tmp_path / place).mkdir(exist_ok=True)
        inside = "/src" if place.endswith("src") else ""
        assert project_of(str(tmp_path / place)) == f"git:{first}{inside}"
    assert project_of(str(tmp_path / "shallow")) == str(tmp_path / "shallow")


def test_no_program_that_a_repository_names_is_started(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "one", "--allow-empty")
    trap = f"touch {tmp_path / 'started'}; false"
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "diff.external", "core.gitProxy"):
        git(tmp_path, "config", key, trap)
    git(tmp_path, "config", "remote.origin.url", f"ext::sh -c '{trap}'")
    git(tmp_path, "config", "remote.origin.promisor", "true")
    git(tmp_path, "config", "extensions.partialClone", "origin")
    head = git(tmp_path, "rev-parse", "HEAD")
    project_of.cache_clear()
    assert project_of(str(tmp_path)) == f"git:{head}"
    (tmp_path / ".git/objects" / head[:2] / head[2:]).unlink()  # a partial clone fetches what it lacks
    project_of.cache_clear()
    assert project_of(str(tmp_path)) in (str(tmp_path), os.path.realpath(tmp_path))
    assert not (tmp_path / "started").exists()


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert usual_name().startswith("uid4242@")
