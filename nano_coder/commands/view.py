"""`nano-coder view`: runs, groups and trainings in a browser, served here or written as one file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from typer import Argument, Option

from nano_coder.commands.options import Log, open_log
from nano_coder.commands.serve import listening_socket, refuse_open_host
from nano_shared.errors import ConfigError, UsageError


def command(
    runs: Annotated[
        list[str] | None, Argument(metavar="[RUN]...", help="Show these; without any, the whole log.")
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="Write one HTML file, which needs no server, and end.")
    ] = None,
    limit: Annotated[
        int, Option("-n", min=1, max=5000, help="With --out: the newest runs of the log.")
    ] = 100,
    host: Annotated[
        str, Option(help="Address to listen on; one that others reach needs --key.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one.")] = 8010,
    key: Annotated[
        list[str] | None,
        Option(metavar="KEY", help="Key that /?key=KEY must give; repeatable.", envvar="NANO_VIEW_KEY"),
    ] = None,
    log: Log = None,
) -> int:
    """Look at the log in a browser: runs with their tokens, groups, forks, and trainings.

    It changes nothing, loads nothing from elsewhere, and follows what is logged meanwhile.
    """
    refuse_open_host(host, key)
    store = open_log(log)
    ids = [store.resolve(run) for run in runs or ()]
    start = f"#/run?id={quote(ids[0])}" if ids else "#/runs"
    from nano_coder.view.answers import LogView

    view = LogView(store)
    if out is not None:
        from nano_coder.view.page import log_answers, run_answers, write_page

        if not out.absolute().parent.is_dir():
            raise UsageError(f"no such directory: {out.parent}; --out names a file in one that exists")
        answers = run_answers(view, ids) if ids else log_answers(view, limit)
        write_page(out, answers, start=start, title=store.url)
        print(out)
        return 0
    try:
        import uvicorn

        from nano_coder.view.app import view_app
    except ModuleNotFoundError as problem:
        if (problem.name or "").startswith("nano"):
            raise
        raise ConfigError(
            f"{problem.name} is missing; pip install 'nano-rl-coder[serve]', or write a file with --out"
        ) from None
    listening = listening_socket(host, port)
    print(f"{store.url} on http://{host}:{listening.getsockname()[1]}/{start}", file=sys.stderr, flush=True)
    server = uvicorn.Server(uvicorn.Config(view_app(view, keys=key or ()), log_level="warning"))
    server.run(sockets=[listening])
    return 0
