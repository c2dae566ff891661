"""The suite `functions`: all its task views, from copying literals to repairing modules."""

from __future__ import annotations

from nano_rl.tasks.suite import TaskSuite, View
from nano_suites.functions.admitted_program import VERSION
from nano_suites.functions.extend_views import make_extend
from nano_suites.functions.fault_views import (
    make_deep_repair,
    make_edit_among_files,
    make_module_repair,
    make_write_test,
)
from nano_suites.functions.literal_views import (
    make_calculate,
    make_choose,
    make_complete,
    make_copy,
    make_emit,
    make_predict,
    make_replace,
)
from nano_suites.functions.mend_views import make_mend
from nano_suites.functions.refactor_views import make_refactor
from nano_suites.functions.repair_views import (
    make_body,
    make_fix,
    make_fix_again,
    make_fix_operator,
    make_repair,
    make_repair_again,
    make_write_body,
)

VIEWS = (
    View("copy", 0, make_copy),
    View("emit", 0, make_emit),
    View("complete", 1, make_complete),
    View("calculate", 1, make_calculate),
    View("predict", 1, make_predict),
    View("choose", 1, make_choose, extra=True),
    View("fix", 2, make_fix),
    View("repair", 2, make_repair),
    View("replace", 2, make_replace, extra=True),
    View("body", 3, make_body),
    View("repair", 3, make_repair),
    # levels 0 to 3 keep their mix: checkpoints were trained on it
    View("fix_operator", 2, make_fix_operator, extra=True),
    View("fix_again", 2, make_fix_again, extra=True),
    View("repair_again", 2, make_repair_again, extra=True),
    View("write_body", 3, make_body, extra=True),
    View("mend", 2, make_mend, extra=True),
    View("mend", 3, make_mend, extra=True),
    View("write_body", 4, make_write_body),
    View("write_test", 5, make_write_test),
    View("repair", 5, make_module_repair),
    View("repair", 6, make_module_repair),
    View("extend", 6, make_extend),
    View("refactor", 6, make_refactor),
    View("edit_among_files", 7, make_edit_among_files),
    View("repair", 7, make_deep_repair),
)


SUITE = TaskSuite(
    name="functions", version=VERSION, about="typed Python functions, from a generator of programs",
    views=VIEWS,
)  # fmt: skip
