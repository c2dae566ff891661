"""`nano-coder doctor`: what the sandbox enforces on this machine, proved by trying to escape."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Literal

from rich.table import Table
from rich.text import Text
from typer import Option

from nano_coder.sandbox.protocol import open_sandbox
from nano_jails.examination import EscapeFinding, examine
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.errors import SandboxError

_SANDBOX = 6
_ADVICE = {
    "landlock": "a second wall around files: Linux 5.19 or newer, with landlock in its lsm= list",
    "cgroup": "exact memory limits: root, or a delegated cgroup as systemd-run --user --scope gives",
    "seccomp": "no table of system calls for this machine",
}


def command(
    kind: Annotated[Literal["ns", "bwrap", "podman"], Option("--sandbox", help="Isolation.")] = "ns",
    image: Annotated[
        str | None, Option("--container-image", help="Container image of --sandbox podman.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Try to escape from the sandbox, abuse it, and print what holds here and by which layer."""
    started = time.monotonic()
    try:
        sandbox = open_sandbox(kind, image=image)
        findings = examine(sandbox)
    except SandboxError as problem:
        raise SandboxError(f"{problem}; nothing that a model writes will run here until then") from None
    seconds, layers = time.monotonic() - started, dict(sandbox.layers)
    report = {
        "sandbox": sandbox.name,
        "attempts": [{**asdict(finding), "held": finding.held} for finding in findings],
        "layers": layers,
    }
    emit(report, as_json, lambda: _show(findings, layers, seconds))
    return 0 if all(f.held for f in findings) else _SANDBOX


def _show(findings: list[EscapeFinding], layers: dict[str, bool], seconds: float) -> None:
    console = Console(soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("attempt", "stopped by", "result"):
        table.add_column(heading, no_wrap=True)
    for finding in findings:
        result = Text("held", "green") if finding.held else Text(f"GOT THROUGH: {finding.through}", "red")
        table.add_row(finding.attempt.replace("_", " "), finding.layer, result)
    console.print(table)
    on = [name.replace("_", " ") for name, is_on in layers.items() if is_on]
    console.print(f"\nlayers on: {', '.join(on)}")
    for name, is_on in layers.items():
        if not is_on:
            console.print(f"layer off: {name.replace('_', ' ')} ({_ADVICE.get(name, 'not available here')})")
    failed = sum(not f.held for f in findings)
    if failed:
        console.print("this machine does not isolate: try --sandbox bwrap, or run nano in a VM", style="red")
    verdict = f"{failed} attempts got through" if failed else f"all {len(findings)} attempts were stopped"
    console.print(f"{verdict}, in {seconds:.1f} s")
