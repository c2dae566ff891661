"""`nano-coder models`: the models that are at hand."""

from __future__ import annotations

import json

from nano_coder.models.opening import known_models
from nano_shared.command_line import JsonOption


def command(as_json: JsonOption = False) -> int:
    """Each name that --model takes on this machine, and what it is."""
    if as_json:
        print(json.dumps([{"name": name, "about": about} for name, about in known_models()]))
        return 0
    for name, what in known_models():
        print(f"{name:32} {what}")
    return 0
