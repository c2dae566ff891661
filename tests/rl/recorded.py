"""Real runs whose texts are given: a tiny model reads them, and its tokens and log-probs are logged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rewarded import ADD, FAIL, SOLVE

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import OpenedWeights, local_policy
from nano_coder.run.execution import Runtime
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.gather.rollouts import execute
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Sampling, Task, Trajectory, TurnTokens

SECOND = ADD.model_copy(update={"key": "second", "prompt": "Mend the module sums.py: add must add."})


def build_model(folder: Path, seed: int = 0) -> Path:
    texts = [m.content for task in (ADD, SECOND) for m in first_messages(COMPACT_1, task, ("sums.py",))]
    return build_tiny(folder, [*texts, *SOLVE, *FAIL], hidden=64, layers=2, max_positions=1024, seed=seed)


class GivenTexts:
    """A local policy that is made to say texts: ids, context and log-probs are what its weights give them."""

    def __init__(self, opened: OpenedWeights, texts: Sequence[str]) -> None:
        self._policy = local_policy(opened.loaded, opened.profile, version=opened.version)
        self._eos = opened.loaded.tokenizer.eos_token_id
        self._texts = list(texts)
        self.id, self.version = self._policy.id, self._policy.version
        self.template_hash, self.context_limit = self._policy.template_hash, self._policy.context_limit

    def count(self, text: str) -> int:
        return self._policy.count(text)

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        text = self._texts.pop(0)
        context = self._policy.template.delta(conversation)
        sampled = (*self._policy.template.encoder.text(text), self._eos)
        row = (*conversation.tokens, *context, *sampled)
        (scores,) = self._policy.engine.score([row], sampling.temperature)
        tokens = TurnTokens(
            row=conversation.row, context_ids=context, sampled_ids=sampled,
            logprobs=tuple(min(0.0, score) for score in scores[-len(sampled) :]),
        )  # fmt: skip
        return Completion(
            text=text, finish=Finish.STOP, tokens=tokens, sampling=sampling, policy_id=self.id,
            policy_version=self.version,
        )  # fmt: skip


def recorded(
    opened: OpenedWeights, folder: Path, *scripts: Sequence[str], task: Task = ADD, name: str = ""
) -> list[Trajectory]:
    """One graded run in the log of `folder` for each script; `name` is what the user called the policy."""
    policies = [GivenTexts(opened, script) for script in scripts]
    with LogStore.open(folder / "log.db") as store:
        runtime = Runtime(
            policy=policies[0], sandbox=open_sandbox(), store=store, policy_name=name,
            sampling=Sampling(max_tokens=200),
        )  # fmt: skip
        return execute([task] * len(scripts), policies, runtime)


def relogged(runs: Sequence[Trajectory], source: Path, target: Path) -> LogStore:
    """Another log of those runs, over the same blobs."""
    store = LogStore.open(target / "log.db", blobs=source / "blobs")
    for run in runs:
        store.append(run)
    return store


__all__ = ["ADD", "FAIL", "SECOND", "SOLVE", "build_model", "recorded", "relogged"]
