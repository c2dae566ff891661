"""A model: `--model answers:FILE` plays the texts of a JSON file, one a turn."""

import json
from pathlib import Path

from nano_coder.models.opening import ModelOptions
from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.errors import UsageError


def open_answers(name: str, options: ModelOptions) -> ScriptedPolicy:
    try:
        texts = json.loads(Path(name).read_text())
    except (OSError, ValueError) as problem:
        raise UsageError(f"answers:{name} is no file of answers: {problem}") from None
    return ScriptedPolicy(texts, id=f"answers:{name}")
