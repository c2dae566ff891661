"""Child interpreters on the host, outside every jail. None of them imports from the current folder.

That folder may be a stranger's project, whose `json.py` would run with the user's rights.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"
"""the environment's form of -P"""


def own_python(*arguments: str) -> list[str]:
    """The command of a child interpreter, with -P."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_workers() -> Iterator[None]:
    """Meanwhile processes that `multiprocessing` spawns start as with -P, which it does not pass on."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
