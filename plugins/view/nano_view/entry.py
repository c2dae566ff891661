"""What the core shows through this package: an extension of the group `nano.views`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nano_coder.installed_views import TrainingView, Viewer

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from nano_coder.serve.access import Access
    from nano_shared.command_line import Console
    from nano_shared.store import LogStore


class LogAndTrainings(Viewer):
    """The viewer beside a server, panels of a training on a terminal, and the page of a calibration."""

    def served(self, store: LogStore, access: Access) -> ASGIApp:
        """The viewer over the log, which the first look at it opens."""

        @cache
        def viewer() -> ASGIApp:
            from nano_view.answers import LogView
            from nano_view.app import view_app

            return view_app(LogView(store), access)

        async def on_request(scope: Scope, receive: Receive, send: Send) -> None:
            await (await asyncio.to_thread(viewer))(scope, receive, send)

        return on_request

    def training(
        self, name: str, total: int, rows: Sequence[Mapping[str, float | None]], console: Console
    ) -> TrainingView | None:
        """Panels on a terminal."""
        from nano_view.report.live import LiveView

        return LiveView(name, total, [dict(row) for row in rows], console) if console.is_terminal else None

    def calibration(self, name: str, report: Any) -> str | None:
        from nano_view.page import answer_key, render_page
        from nano_view.report.page import calibration_page

        answers = {answer_key("training", {"name": name}): calibration_page(report)}
        return render_page(answers, start=f"#/training?name={quote(name)}", title=name)


VIEW = LogAndTrainings()
