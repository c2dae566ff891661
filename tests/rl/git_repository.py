"""A git repository of a test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    env = {**clean, "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", *who, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, env=env
    ).stdout.strip()


def commit(folder: Path, subject: str, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    return git(folder, "rev-parse", "HEAD")
