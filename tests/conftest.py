"""Keeps the garbage collector from what imports have made: searching it takes a tenth of the time or more."""

from __future__ import annotations

import gc

gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
