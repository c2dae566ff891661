"""Sandboxes by other programs: podman for container images, bubblewrap where we may make no namespaces."""

from __future__ import annotations

from pathlib import Path

from nano_coder.sandbox.protocol import Sandbox, proven


def open_bwrap(python: str | None, project: Path | None = None) -> Sandbox:
    """Raises SandboxError where it does not isolate."""
    from nano_containers.bubblewrap import BwrapSandbox

    return proven(BwrapSandbox(python, project))


def open_podman(python: str | None) -> Sandbox:
    """Raises SandboxError where podman cannot run containers. Each image is proved when it is named."""
    from nano_containers.podman import PodmanSandbox

    return PodmanSandbox(python)


open_podman.runs_images = True  # type: ignore[attr-defined]
