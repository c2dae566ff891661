"""Our side of `grpo_step.py`: one step of the trainer for each line on stdin.

    python grpo_step_nano.py MODEL_FOLDER CASE_JSON

The parts are those of `nano-rl train`: the local policy's engine samples (one slot an agent), tools run in
the sandbox, and `update.learn` makes the step, from trajectories as the log holds them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from grpo_step_case import OBSERVED, TEMPLATE, Case, answer_steps, prompt_of

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.models.local.engine import Engine
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.weights import load_policy
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.config import TrainConfig
from nano_rl.learn.advantages import RolloutBatch, credit_group
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.groups import form_groups, group_metrics
from nano_rl.learn.learner import Learner, prepare
from nano_rl.learn.train_step import Updater
from nano_rl.learn.utilisation import FlopCounter
from nano_shared.policy import Conversation
from nano_shared.process import return_freed_memory
from nano_shared.types import (
    Limits,
    Message,
    Role,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Trust,
    Turn,
    Verdict,
)


class Steps:
    """The trainer on one case."""

    def __init__(self, model: Any, tokenizer: Any, case: Case) -> None:
        self.case = case
        self.template = ChatTemplate(TEMPLATE, tokenizer)
        self.config = TrainConfig(
            steps=1_000_000, prompts_per_step=case.prompts, group_size=case.rollouts, dtype=case.dtype,
            lora_rank=case.lora_rank, max_tokens=case.max_tokens,
            optimizer=OptimizerConfig(learning_rate=1e-6),
            # a random model's samples are as good as any here; what differs between steps is reported
            guards=GuardConfig(mismatch_max=1.0),
        )  # fmt: skip
        self.model = prepare(model, lora_rank=case.lora_rank, seed=1)
        self._flops = FlopCounter(self.model)
        self.learner = Learner(self.model, self.config.optimizer, steps=self.config.steps)
        # no token ends a turn: lengths are the case's
        self.engine = Engine(
            self.model, eos_ids=frozenset(), context_limit=model.config.max_position_embeddings
        )
        self.sandbox = open_sandbox() if case.turns > 1 else None
        self.tasks = [Task(key=f"problem-{i}", prompt=self._prompt(i)) for i in range(case.prompts)]
        self.step = 0
        self._tools = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> dict[str, float]:
        started = time.perf_counter()
        runs = self.sampled()
        rolled = time.perf_counter()
        groups = form_groups(runs)
        updater = Updater(learner=self.learner, config=self.config)
        terms = self.config.objective.terms
        batch = RolloutBatch(credited=[credit_group(group, terms, None) for group in groups])
        with self._flops():
            rows = updater.credit(batch, self.step)
            values = updater.update(rows, group_metrics(groups), None, self.step)
        return_freed_memory()
        self.step += 1
        generated = sum(len(turn.completion.tokens.sampled_ids) for run in runs for turn in run.turns)
        return {
            "rollout": rolled - started, "train": time.perf_counter() - rolled, "tools": self._tools,
            "generated": generated, "trained": values["tokens"], "mismatch": values["mismatch"],
            "mismatch_max": values["mismatch_max"], "flops": self._flops.total(values["tokens"]),
        }  # fmt: skip

    def sampled(self) -> list[Trajectory]:
        """The rollouts of a step."""
        policy = LocalPolicy(self.engine, self.template, id="benchmark", version=self.step)
        slots = [policy.agent(i) for i in range(self.case.prompts * self.case.rollouts)]
        places = [(task, g) for task in self.tasks for g in range(self.case.rollouts)]
        self._tools = 0.0
        with ThreadPoolExecutor(len(slots)) as pool, policy.hosted() as lead:
            agents = [
                pool.submit(self._rollout, policy, slot, place)
                for slot, place in zip(slots, places, strict=True)
            ]
            for agent in agents:
                lead(agent)
            return [agent.result() for agent in agents]

    def _rollout(self, policy: LocalPolicy, slot: Any, place: tuple[Task, int]) -> Trajectory:
        task, member = place
        conversation = Conversation((Message(role=Role.USER, content=task.prompt),))
        seed = hash((self.step, task.key, member)) % 2**31
        sampling = Sampling(temperature=1.0, max_tokens=self.case.length(member), seed=seed)
        turns: list[Turn] = []
        with slot:
            for index in range(self.case.turns):
                completion = policy.complete(conversation, sampling)
                conversation.record(completion)
                turns.append(Turn(index=index, completion=completion, parser="none", started=0.0, ended=1.0))
                if index + 1 < self.case.turns:
                    conversation.append(Message(role=Role.TOOL, content=self._call()))
        sampled = [i for turn in turns for i in turn.completion.tokens.sampled_ids]
        return Trajectory(
            id=f"{self.step}-{task.key}-{member}", task=task, turns=tuple(turns), stop=StopReason.FINISHED,
            runtime_version="0", profile="none", profile_hash="p", template_hash="t", tools_hash="h",
            policy="benchmark", started=0.0,
            verdict=Verdict(
                reward=sum(sampled) % 7 / 7, trust=Trust.HIDDEN, grader="benchmark", graded_hash="g"
            ),
        )  # fmt: skip

    def _call(self) -> str:
        """Run the case's program in a jail of its own."""
        started = time.perf_counter()
        assert self.sandbox is not None
        jail = self.sandbox.open(None, Limits())
        try:
            result = jail.run_python(self.case.program, timeout=30)
        finally:
            jail.close()
        with self._lock:
            self._tools += time.perf_counter() - started
        return result.stdout.decode()[:OBSERVED]

    def _prompt(self, seed: int) -> str:
        def count(text: str) -> int:
            return len(self.template.delta(Conversation((Message(role=Role.USER, content=text),))))

        return prompt_of(self.case.prompt_tokens, seed, count)


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    case = Case(**json.loads(sys.argv[2]))
    loaded = load_policy(sys.argv[1], dtype=case.dtype)
    answer_steps(Steps(loaded.model, loaded.tokenizer, case))


if __name__ == "__main__":
    main()
