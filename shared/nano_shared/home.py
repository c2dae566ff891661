"""Where nano keeps its data: `NANO_HOME`, else the platform's user data folder."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def nano_home() -> Path:
    """The data folder, absolute. It is not created here: whoever writes into it does that."""
    chosen = os.environ.get("NANO_HOME")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_data_path("nano")
