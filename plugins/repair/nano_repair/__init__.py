"""The checkpoint `coder-repair`: an adapter over coder-1.5b for the profile repair-1."""

from pathlib import Path

FOLDER = Path(__file__).parent / "policy"
