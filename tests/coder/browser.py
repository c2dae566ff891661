"""A browser for tests of pages: the system's Chromium, driven by Playwright, cut off from the network."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


class Page:
    """A page, what it asked for, and what it complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)

    def open(self, url: str) -> Any:
        """Go to a view, and wait until its heading stands."""
        self.page.goto("about:blank")
        self.page.goto(url)
        self.page.wait_for_selector("h1")
        return self.page

    def violations(self) -> list[str]:
        """What axe-core finds wrong for people who cannot see, or use no mouse."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{v['id']}: {node['html'][:120]}" for v in found for node in v["nodes"]]

    def overflows(self) -> bool:
        """Whether the page scrolls sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))


class Browser:
    """The browser of a test module; every page has cookies and settings of its own."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextmanager
    def page(self, **settings: Any) -> Iterator[Page]:
        """A page; `settings` as in Playwright: viewport, color_scheme, ..."""
        context = self._chromium.new_context(**settings)
        page = context.new_page()
        page.set_default_timeout(60_000)
        yield Page(page)
        context.close()


@contextmanager
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield Browser(chromium)
        chromium.close()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The application on a free port of this machine; yields its root."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
