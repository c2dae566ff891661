"""`nano-rl tasks serve`: a task file as a resources server, as NeMo Gym's agents call one."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from nano_rl.commands.session import log_option
from nano_rl.tasks.make import read_tasks
from nano_shared.errors import ConfigError


@click.command("serve")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Callers run code in jails.")
@click.option("--port", type=click.IntRange(0, 65535), default=8010, show_default=True)
@click.option("--sessions", type=click.IntRange(1), default=64, show_default=True, help="Open at once.")
@click.option("--idle", type=click.FloatRange(1), default=1800.0, show_default=True, help="Seconds.")
@log_option
def command(file: Path, host: str, port: int, sessions: int, idle: float, log: str | None) -> int:
    """Serve /seed_session, /TOOL and /verify over the tasks of FILE; every session is logged as a run."""
    tasks = read_tasks(file)
    try:
        import uvicorn

        from nano_rl.formats.gym_server import GymSessions as Sessions
        from nano_rl.formats.gym_server import gym_app
    except ModuleNotFoundError as problem:
        raise ConfigError(f"{problem.name} is missing; pip install 'nano-rl-coder[gym]'") from None
    from nano_coder.run.redacting_log import redacting_store
    from nano_coder.sandbox.backend import open_sandbox
    from nano_rl.formats.episode import Episode
    from nano_shared.store import LogStore

    sandbox, store = open_sandbox(), redacting_store(LogStore.open(log))
    held = Sessions(lambda task: Episode(task, sandbox, store), most=sessions, idle_seconds=idle)
    print(f"{len(tasks)} tasks on http://{host}:{port}", file=sys.stderr)
    uvicorn.run(gym_app(tasks, held), host=host, port=port, log_level="warning")
    return 0
