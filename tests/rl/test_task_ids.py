"""The ids of generated tasks stay what they are: logs, splits and trainings name tasks by them.

A change of a suite's content changes its hash here and its version: it is meant, and its commit says so.
"""

from __future__ import annotations

import hashlib

import pytest

from nano_rl.tasks.suite import find_suite
from nano_shared.types import Split

RECORDED = {
    "functions": "dc7a093965bab427",
    "shell": "51f11097eb6c7b14",
    "sql": "34a65e2f55a1058c",
    "data": "002b0b2dcc843da9",
    "logic": "9593fcd833d74e6f",
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_seed_makes_the_task_that_it_always_made(name: str) -> None:
    suite = find_suite(name)
    views = [view for view in suite.views if view.name != "mend"]  # came later, drawn when named alone
    tasks = [suite.make(view, split, 3) for view in views for split in (Split.TRAIN, Split.TEST)]
    said = "\n".join(f"{task.key} {task.id} {task.split}" for task in tasks)
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == RECORDED[name]
