"""What goes out comes back: every task, through every format, or it is refused by name."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from exchange_strategies import HIDDEN, tasks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_formats.row_format import whole
from nano_rl.task_formats import FORMATS, ReadOptions
from nano_shared.errors import Refusal
from nano_shared.types import Task

CARRIES_EVERYTHING = ("nemo-gym", "verifiers", "trl")
slowly = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


def there_and_back(name: str, given_tasks: list[Task]) -> tuple[list[str], list[str]]:
    """What was carried and what came back, and nothing of it may be refused at import."""
    format = FORMATS[name]
    refused = {refusal.where for refusal in format.refusals(given_tasks)}
    carried = [task for task in given_tasks if task.key not in refused]
    if not carried:
        return [], []
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        format.write(carried, out)
        back = list(format.read(out, ReadOptions()))
    assert not [item for item in back if isinstance(item, Refusal)]
    return sorted(map(whole, carried)), sorted(whole(item) for item in back if isinstance(item, Task))


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "swe-bench"])
@slowly
@given(data=st.data())
def test_import_of_an_export_gives_the_same_tasks(name: str, data: st.DataObject) -> None:
    some = data.draw(st.lists(tasks(), min_size=1, max_size=2, unique_by=lambda task: task.key))
    carried, back = there_and_back(name, some)
    assert back == carried


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("name", CARRIES_EVERYTHING)
@settings(parent=slowly, max_examples=4)
@given(data=st.data())
def test_these_formats_carry_every_kind_of_check(name: str, kind: str, data: st.DataObject) -> None:
    task = data.draw(tasks(HIDDEN[kind]))
    carried, back = there_and_back(name, [task])
    assert carried == back == [whole(task)]
