"""`nano-rl tasks serve`: tasks over HTTP, as NeMo Gym's agents ask for them."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option

from nano_coder.commands.options import open_log
from nano_coder.commands.serve import listening_socket
from nano_coder.serve.access import opened_access
from nano_rl.commands.options import Log, TaskFile
from nano_rl.tasks.task_file import read_tasks
from nano_shared.errors import ConfigError, UsageError


def command(
    file: TaskFile,
    host: Annotated[
        str,
        Option(help="Address to listen on; one that others reach needs --key. Callers run code in jails."),
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8010,
    key: Annotated[
        list[str] | None,
        Option(metavar="KEY", help="API key that callers must send; repeatable.", envvar="NANO_TASKS_KEY"),
    ] = None,
    sessions: Annotated[int, Option(min=1, help="Open at once.")] = 64,
    idle: Annotated[float, Option(min=1, help="Seconds after which a session ends.")] = 1800.0,
    log: Log = None,
) -> int:
    """Serve /seed_session, /TOOL and /verify over the tasks of FILE; every session is logged as a run."""
    access = opened_access(host, key, variables=("NANO_TASKS_KEY",))
    tasks = read_tasks(file)
    if behind := next((task.key for task in tasks if task.earlier), None):
        raise UsageError(f"{file}: task {behind!r} comes behind others, and sessions have one task each")
    try:
        import uvicorn

        from nano_coder.serve.http_json import BoundedConnection
        from nano_formats.nemo_gym.server import GymSessions as Sessions
        from nano_formats.nemo_gym.server import gym_app
    except ModuleNotFoundError as problem:
        raise ConfigError(f"{problem.name} is missing; pip install 'nano-rl-coder[serve]'") from None
    from nano_coder.config import redacting_store
    from nano_formats.episode import Episode
    from nano_rl.commands.session import sandbox_opener

    sandbox, store = sandbox_opener()(), redacting_store(open_log(log, create=True))
    held = Sessions(lambda task: Episode(task, sandbox, store), most=sessions, idle_seconds=idle)
    with listening_socket(host, port) as listening:
        root = f"http://{host}:{listening.getsockname()[1]}"
        print(f"{len(tasks)} tasks on {root}", file=sys.stderr, flush=True)
        served = uvicorn.Config(gym_app(tasks, held, access), log_level="warning", http=BoundedConnection)
        uvicorn.Server(served).run(sockets=[listening])
    return 0
