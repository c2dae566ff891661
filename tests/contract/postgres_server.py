"""A Postgres server of a test's own, from the installed package: an ordinary user, a temporary folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import sqlalchemy as sa


def programs() -> Path | None:
    """Folder of initdb and pg_ctl; Debian keeps it off the path."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(versions, key=lambda path: float(path.parent.name), default=None)


def missing() -> str | None:
    """Why no server can be started here."""
    if programs() is None:
        return "no Postgres server is installed (apt-get install postgresql)"
    if find_spec("psycopg") is None:
        return "psycopg is not installed (the extra `postgres`)"
    return None


SUPERUSER = "nano_admin"


class PostgresServer:
    """Reached through a socket in its folder. The role `nano` owns the databases and is no superuser."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder, self._settings, self._numbers = folder, settings, count()
        if os.geteuid() == 0:  # the server refuses to run as root
            owner = pwd.getpwnam("nobody")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            self._as: dict[str, Any] = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        else:
            self._as = {}
        self._run("initdb", "-A", "trust", "-U", SUPERUSER, "--no-sync", "-E", "UTF8", "--locale=C.UTF-8")
        self.start()
        self.execute("CREATE ROLE nano LOGIN")
        self.template: str | None = None

    def _run(self, program: str, *arguments: str) -> None:
        folder = programs()
        assert folder is not None
        done = subprocess.run(
            [folder / program, "-D", self.folder / "data", *arguments],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **self._as,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        own = ("listen_addresses=", f"unix_socket_directories={self.folder}", "fsync=off")
        options = " ".join(f"-c {setting}" for setting in (*own, *self._settings))
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self._run("pg_ctl", "-w", "-m", mode, "stop")

    def url(self, database: str = "postgres", role: str = "nano") -> str:
        return f"postgresql://{role}@/{database}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        url = self.url(database, SUPERUSER).replace("://", "+psycopg://")
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        try:
            with engine.connect().execution_options(no_parameters=True) as connection:
                result = connection.exec_driver_sql(statement)
                return [tuple(row) for row in result] if result.returns_rows else []
        finally:
            engine.dispose()

    def new_database(self, *, migrated: bool = False) -> str:
        """The URL of an empty database, or of one whose log is empty."""
        if migrated and self.template is None:
            from nano_shared.store import LogStore

            url = self.new_database()
            LogStore.open(url).close()
            self.template = url.partition("@/")[2].partition("?")[0]
        name = f"log{next(self._numbers)}"
        template = self.template if migrated else "template0"
        self.execute(f"CREATE DATABASE {name} OWNER nano TEMPLATE {template}")
        return self.url(name)


def _in_memory() -> Path | None:
    """A file system in memory with room for the databases of a whole session, 300 files each, which a disk
    takes minutes to remove."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() and shutil.disk_usage(folder).free > 6 << 30 else None


@contextmanager
def running_server(*settings: str) -> Iterator[PostgresServer]:
    # not pytest's folder: as root it is closed to the user that runs the server, and too long for a socket
    folder = Path(tempfile.mkdtemp(prefix="nano-postgres-", dir=_in_memory()))
    try:
        server = PostgresServer(folder, *settings)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
