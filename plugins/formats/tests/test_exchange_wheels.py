"""Example files that NeMo Gym's and Harbor's wheels ship; NANO_EXCHANGE_EXAMPLES names the folder.

`make exchange-examples` fetches them, and `make test-all` sets the variable.
"""

import json
import os
from pathlib import Path

import pytest

from nano_formats.harbor.tasks import HARBOR
from nano_formats.nemo_gym.tasks import NEMO_GYM
from nano_rl.task_formats import ReadOptions
from nano_shared.errors import Refusal
from nano_shared.strict_json import Row
from nano_shared.types import Task

EXAMPLES = os.environ.get("NANO_EXCHANGE_EXAMPLES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES, reason="NANO_EXCHANGE_EXAMPLES is not set; see make exchange-examples"),
]


def test_every_shipped_rollout_is_imported_or_refused_by_its_line() -> None:
    files = sorted(Path(EXAMPLES).rglob("example_rollouts*.jsonl"))
    assert len(files) == 219
    whole = 0
    for file in files:
        found = list(NEMO_GYM.read(file, ReadOptions()))
        refusals = [item for item in found if isinstance(item, Refusal)]
        assert found
        assert all(refusal.where.startswith(f"{file}:") and refusal.field for refusal in refusals)
        if not refusals:
            whole += 1
            tasks = [item for item in found if isinstance(item, Task)]
            given_back = [row for task in tasks for row in NEMO_GYM.to_rows(task)]
            lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
            assert in_any_order(given_back) == in_any_order(lines)
    assert whole >= 186


def in_any_order(rows: list[Row]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def test_the_template_task_of_harbor_is_refused_until_it_says_something() -> None:
    (template,) = Path(EXAMPLES).rglob("template-task")
    (found,) = HARBOR.read(template, ReadOptions())
    assert isinstance(found, Refusal)  # its instruction is empty
    assert found.field == "prompt"
