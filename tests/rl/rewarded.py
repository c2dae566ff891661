"""Real rollouts of scripted policies, in a real jail and a real log, for the tests of rewards."""

from __future__ import annotations

from pathlib import Path

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_preferences.registry import open_reward
from nano_rl.config import RewardConfig
from nano_rl.gather.rollouts import execute
from nano_rl.rewards import Reward
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.store import LogStore
from nano_shared.types import Limits, Task, Trajectory

RIGHT = "    return a + b"
WRONG = "    return a - b"
STARTER = f"def add(a, b):\n{WRONG}\n"
TEST = "from sums import add\n\n\ndef test():\n    assert add(2, 3) == 5\n"
ADD = Task(
    key="add",
    prompt="Mend add in sums.py, so that add(2, 3) gives 5.",
    files={"sums.py": STARTER, "test_sums.py": TEST},
    artifacts=("sums.py",),
    check="python -m pytest -q",
    limits=Limits(max_turns=8, max_tokens=2000),
    hidden=CaseChecks(
        entry_point="add",
        cases=(Case(args=[1, 1], expected=2), Case(args=[4, 0], expected=4), Case(args=[-1, 5], expected=4)),
    ),
)  # fmt: skip
SUBMIT = "@submit"
READ = "@read_file path=sums.py"
MEND = f"@edit_file path=sums.py line=2\n{RIGHT}"
SOLVE = (READ, MEND, SUBMIT)
FAIL = (READ, SUBMIT)


def new_runtime(folder: Path) -> Runtime:
    return Runtime(
        policy=ScriptedPolicy([]),
        sandbox=open_sandbox(),
        store=LogStore.open(folder / "log.db"),
        profile=COMPACT_1,
    )


def rolled(runtime: Runtime, *scripts: tuple[str, ...], task: Task = ADD) -> list[Trajectory]:
    """One graded and logged run of the task for each script of completions."""
    policies = [ScriptedPolicy(script, tokens=True) for script in scripts]
    return execute([task] * len(scripts), policies, runtime)


def opened(**parts: object) -> Reward:
    """A reward of parts by name: a weight, or settings."""
    return open_reward(RewardConfig(parts=parts))  # type: ignore[arg-type]
