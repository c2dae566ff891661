"""A program that meets its limit of processor time: told by the kernel's signal, whatever its clock says.

The kernel ends it by the ticks that it was charged with. On a busy machine these were seen to be a fifth more
than what its precise clock says: the limit is met though `cpu_s` is below it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from nano_coder.sandbox.protocol import ExecResult, Jail, ResourceUse, open_sandbox
from nano_graders.one_process_suite import _cause
from nano_shared.types import Limits

CALM = ExecResult(
    exit_code=0, signal=None, timed_out=False, oom=False, stdout=b"", stderr=b"", stdout_bytes=0,
    stderr_bytes=0, used=ResourceUse(wall_s=20.0),
)  # fmt: skip


@pytest.fixture
def jail() -> Iterator[Jail]:
    with closing(open_sandbox("ns").open(None, Limits(tool_seconds=60))) as jail:
        yield jail


@pytest.mark.slow
def test_a_limit_that_is_met_is_told_by_its_signal(jail: Jail) -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_CPU, (1, 5))\nwhile True: pass"
    result = jail.run_python(code)
    assert (result.exit_code, result.signal, result.timed_out) == (None, signal.SIGXCPU, False)
    assert 0.1 < result.used.cpu_s < 3


@pytest.mark.parametrize("cpu_s", [0.0, 8.1, 10.4])
def test_the_signal_of_the_limit_is_a_time_out_at_any_clock(cpu_s: float) -> None:
    assert _cause({"ended": {"signal": int(signal.SIGXCPU)}, "cpu_s": cpu_s}, CALM) == "agent_timeout"


def test_another_signal_below_the_limit_is_a_crash() -> None:
    assert _cause({"ended": {"signal": int(signal.SIGSEGV)}, "cpu_s": 8.1}, CALM) == "crash"
