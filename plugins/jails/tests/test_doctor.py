"""doctor tells what a sandbox holds, and would tell where one does not."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nano_coder.cli import cli
from nano_coder.sandbox.protocol import open_sandbox
from nano_containers.folder_jail import NoSandbox
from nano_jails.examination import examine, host_bait, try_to_escape
from nano_shared.types import Limits


def test_every_attempt_is_stopped_here() -> None:
    """In a warm jail's own interpreter, and in one that was started there."""
    findings = examine(open_sandbox("ns"))
    assert len(findings) >= 50
    assert [(f.attempt, f.through) for f in findings if not f.held] == []


def test_what_is_not_confined_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any sandbox the attempts succeed: they can fail, so their success means something."""
    monkeypatch.setenv("NANO_ALLOW_NO_SANDBOX", "1")
    with host_bait() as outside, closing(NoSandbox().open(None, Limits())) as jail:
        found = try_to_escape(jail, outside)
    through = {attempt for attempt, achieved in found.items() if achieved}
    assert through >= {
        "read_a_file_of_the_host",
        "read_keys_in_an_environment",
        "see_processes_of_the_host",
        "reach_a_server_of_the_host",
        "reach_an_abstract_socket_of_the_host",
        "hold_memory_that_nobody_counts",
        "filter_system_calls_itself",
        "keep_descriptors_in_flight",
        "be_traced",
        "enlarge_a_pipe",
        "call_as_another_machine",
        "wait_for_the_disks_of_the_host",
    }
    assert not Path("/nano-escape").exists()


@pytest.mark.slow
def test_the_report_names_attempts_layers_and_verdict() -> None:
    done = CliRunner().invoke(cli, ["doctor"], standalone_mode=False)
    assert done.return_value == 0
    assert "read a file of the host" in done.output
    assert "layers on: empty environment" in done.output
    assert "attempts were stopped" in done.output


@pytest.mark.slow
def test_the_report_as_json() -> None:
    done = CliRunner().invoke(cli, ["doctor", "--json"], standalone_mode=False)
    report = json.loads(done.output)
    assert report["sandbox"] == "ns"
    assert all(attempt["held"] for attempt in report["attempts"])
    assert report["layers"]["seccomp"] is True
