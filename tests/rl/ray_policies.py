"""Policies of rollout workers in tests: each worker process makes its own."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.policy import Conversation, Policy
from nano_shared.types import Completion, Sampling


def open_scripted(on_change: Callable[[str], None]) -> Policy:
    return ScriptedPolicy(["no call"])
