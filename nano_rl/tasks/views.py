"""Task views: the same programs shown as literals to copy, values to predict, lines to fix or to write."""

from __future__ import annotations

from nano_rl.tasks.first_views import (
    make_calculate,
    make_choose,
    make_complete,
    make_copy,
    make_emit,
    make_predict,
)
from nano_rl.tasks.grammar import VERSION
from nano_rl.tasks.repair_views import make_body, make_fix, make_repair
from nano_rl.tasks.suites import TaskSuite, View
from nano_shared.types import Split, Task

VIEWS = (
    View("copy", 0, make_copy),
    View("emit", 0, make_emit),
    View("complete", 1, make_complete),
    View("calculate", 1, make_calculate),
    View("predict", 1, make_predict),
    View("choose", 1, make_choose, extra=True),
    View("fix", 2, make_fix),
    View("repair", 2, make_repair),
    View("body", 3, make_body),
    View("repair", 3, make_repair),
)


SUITE = TaskSuite(
    name="functions",
    version=VERSION,
    about="typed Python functions, from a generator of programs",
    views=VIEWS,
)


def make_task(view: View, split: Split, seed: int) -> Task:
    """The task of one view of the suite `functions`."""
    return SUITE.make(view, split, seed)
