"""`nano-coder view`: runs, groups and trainings in a browser, served here or written as one file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, Log, open_log
from nano_shared.errors import UsageError

if TYPE_CHECKING:
    from nano_shared.types import Trajectory
    from nano_view.answers import TokenColumns


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
    model: Annotated[
        str | None,
        Option(
            help="Weights that score the tokens: entropy, importance ratio, or mismatch with the sampler."
        ),
    ] = None,
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Look at the log in a browser: runs with their tokens, groups, forks, and trainings.

    It changes nothing, loads nothing from elsewhere, and follows what is logged meanwhile.
    """
    if out is None:
        from nano_coder.serve.access import listening_socket, opened_access

        access = opened_access(host, key, variables=("NANO_VIEW_KEY",))
        listening = listening_socket(host, port)
    elif out.is_dir():
        raise UsageError(f"{out} is a folder; --out names a file")
    elif not out.absolute().parent.is_dir():
        raise UsageError(f"no such directory: {out.parent}; --out names a file in one that exists")
    store = open_log(log, directory)
    ids = [store.resolve(run) for run in runs or ()]
    start = f"#/run?id={quote(ids[0])}" if ids else "#/runs"
    from nano_view.answers import LogView

    view = LogView(store, _scores(model) if model else None)
    if out is not None:
        from nano_view.page import log_answers, run_answers, write_page

        answers = run_answers(view, ids) if ids else log_answers(view, limit)
        write_page(out, answers, start=start, title=store.url)
        print(out)
        return 0
    from nano_coder.serve.access import root_of, run_server
    from nano_view.app import view_app

    print(f"{store.url} on {root_of(host, listening)}/{start}", file=sys.stderr, flush=True)
    run_server(view_app(view, replace(access, admin_keys=access.keys)), listening)
    return 0


def _scores(model: str) -> Callable[[Trajectory], TokenColumns]:
    from nano_coder.models.opening import open_weights
    from nano_view.token_scorer import TokenScorer

    return TokenScorer(open_weights(model)).of
