"""`nano-rl tasks serve`: a task file as a resources server, as NeMo Gym's agents call one."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option

from nano_coder.commands.options import open_log
from nano_rl.commands.options import Log, TaskFile
from nano_rl.tasks.make import read_tasks
from nano_shared.errors import ConfigError, UsageError


def command(
    file: TaskFile,
    host: Annotated[str, Option(help="Callers run code in jails.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8010,
    sessions: Annotated[int, Option(min=1, help="Open at once.")] = 64,
    idle: Annotated[float, Option(min=1, help="Seconds after which a session ends.")] = 1800.0,
    log: Log = None,
) -> int:
    """Serve /seed_session, /TOOL and /verify over the tasks of FILE; every session is logged as a run."""
    tasks = read_tasks(file)
    if behind := next((task.key for task in tasks if task.earlier), None):
        raise UsageError(f"{file}: task {behind!r} comes behind others, and sessions have one task each")
    try:
        import uvicorn

        from nano_rl.formats.gym_server import GymSessions as Sessions
        from nano_rl.formats.gym_server import gym_app
    except ModuleNotFoundError as problem:
        raise ConfigError(f"{problem.name} is missing; pip install 'nano-rl-coder[gym]'") from None
    from nano_coder.run.redacting_log import redacting_store
    from nano_coder.sandbox.backend import open_sandbox
    from nano_rl.formats.episode import Episode

    sandbox, store = open_sandbox(), redacting_store(open_log(log, create=True))
    held = Sessions(lambda task: Episode(task, sandbox, store), most=sessions, idle_seconds=idle)
    print(f"{len(tasks)} tasks on http://{host}:{port}", file=sys.stderr)
    uvicorn.run(gym_app(tasks, held), host=host, port=port, log_level="warning")
    return 0
