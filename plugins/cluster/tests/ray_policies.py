"""What rollout workers of tests sample from: each worker process makes its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from nano_coder.models.scripted import ScriptedPolicy
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Role, Sampling


class ByTurn(ScriptedPolicy):
    """Answers turn k of any conversation with text k, so that another process can go on with it."""

    def __init__(self, texts: tuple[str, ...], kills: Path | None = None) -> None:
        """The process that finds a file of `kills` removes it, and kills itself at the second turn."""
        super().__init__([])
        self._answers, self._kills = texts, kills

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        turn = sum(message.role is Role.ASSISTANT for message in conversation.messages)
        if turn and self._kills:
            for file in self._kills.iterdir():
                file.unlink()
                os.kill(os.getpid(), signal.SIGSTOP if file.name.startswith("hang") else signal.SIGKILL)
                time.sleep(60)
        answer = self._answers[min(turn, len(self._answers) - 1)]
        return ScriptedPolicy([answer]).complete(conversation, sampling)


def open_by_turn(texts: tuple[str, ...], kills: Path | None, on_change: Callable[[str], None]) -> ByTurn:
    return ByTurn(texts, kills)
