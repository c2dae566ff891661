"""Settings of trainings by policy gradients and imitation; the defaults are the recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from nano_rl.learn.config import OfflineConfig, OptimizerConfig, Quantise, UpdateConfig
from nano_shared.errors import UsageError
from nano_shared.settings import Config

_BOUND = 4
"""`max_staleness` of `asynchronous` where none is set"""


def vllm_python(engine: str) -> str:
    """The interpreter that vllm:PYTHON names, this one for vllm alone. Raises UsageError if it is none."""
    python = engine.partition(":")[2] or sys.executable
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise UsageError(
            f"--engine {engine}: {python} is no Python that can be run; name that of an environment with"
            " vLLM: python3 -m venv v && v/bin/pip install vllm, then --engine vllm:v/bin/python"
        )
    return python


class RewardConfig(Config):
    """What a reward is made of. The parts and their settings are of the plug-in preferences."""

    parts: dict[str, dict[str, JsonValue]] = Field({"tests": {"weight": 1.0}})
    """part -> its weight and settings; a bare number is its weight"""
    gate: float = Field(1.0, gt=0, le=1)
    """outcome from which shaping counts"""
    tie_break: float = Field(0.0, ge=0, lt=1)
    """below the gate: share of the smallest step between outcomes that shaping may move"""

    @field_validator("parts", mode="before")
    @classmethod
    def _weights(cls, parts: Any) -> Any:
        if not isinstance(parts, Mapping) or not parts:
            raise ValueError("name at least one part, for instance tests = 1")
        return {n: {"weight": s} if isinstance(s, int | float) else s for n, s in parts.items()}


class TrainConfig(UpdateConfig):
    prompts_per_step: int = Field(8, ge=1)
    """tasks of one step, each with a group of its own"""
    group_size: int = Field(8, ge=0)
    """fresh rollouts of each task; 0 trains on logs alone"""
    temperature: float = Field(1.0, gt=0)
    """of the sampler, and of the trainer's softmax; top-p and top-k are off in training"""
    save_every: int | None = Field(None, ge=1)
    """steps between saved states; None: 1, and one more for each 2 GiB of a state; a process that is killed
    goes on from the last one"""
    resume: bool = False
    """go on with a training of that name, or refuse where none is saved; settings that the steps done do not
    depend on (steps, max_tokens, guards) may then differ"""
    refill: int = Field(0, ge=0)
    """dynamic sampling: times that a step replaces groups whose rollouts all earned the same by groups of
    other tasks; 0 by default, since each time costs a round of rollouts"""
    reflect: int = Field(0, ge=0)
    """second attempts of each fresh rollout that failed, which read its diff and its check's output and are a
    group; 0 for none, else 2 or more"""
    scheduler: Literal["lockstep", "free"] | None = None
    """of rollouts: lockstep decodes in rounds that a seed reproduces bit for bit; free decodes each request
    when it comes; None is free on a GPU, else lockstep"""
    engine: tuple[str, ...] = ()
    """URLs of servers that make the rollouts, http://HOST:8000/v1, separated by commas: vLLM or nano-coder
    serve, of the model that is trained; or vllm:PYTHON, an environment whose vLLM starts and ends with the
    training. A LoRA adapter is loaded there after each update"""
    ray: str | None = None
    """run agents, jails and graders as actors of a Ray cluster: auto, which starts one here where RAY_ADDRESS
    names none, or HOST:6379; their tokens come from the servers of `engine`"""
    rollout_workers: int | None = Field(None, ge=1)
    """actors of `ray`, each for up to four runs at a time; None: one for each CPU of the cluster. Under
    torchrun: ranks that roll out, each with a copy of the weights; None: all"""
    asynchronous: bool = False
    """roll out further steps while one is learned from, by at most `max_staleness` updates (None: 4), which
    importance weights correct; without `engine` one step, in a second process with a copy of the weights"""
    offload: bool = False
    """under torchrun: keep each rank's weights, gradients and optimizer in the memory of its host, except
    those of the layer that runs"""
    reward: RewardConfig | None = None
    """None takes the grader's own rewards"""
    controls: float = Field(0.0, ge=0, le=0.5)
    """impossible rollouts for each ordinary one: hacking is measured on them, nothing is learned from them"""
    lambda_sft: float = Field(0.0, ge=0)
    """weight of imitation in the mixed loss L_RL + lambda_sft * L_SFT + beta * L_KL"""
    imitate: Literal["own", "oracles", "log", "rest"] = "own"
    """what lambda_sft imitates: the step's own successes, the tasks' oracles, successes in the log, or those
    of the logs that policy gradients may not use (rest; what --from-logs imitates where nothing is said)"""

    @property
    def off_policy_bound(self) -> int:
        """Largest number of updates between sampling and training of a fresh token, and of further steps that
        are rolled out while one is learned from."""
        if not self.asynchronous:
            return 0
        bound = self.objective.max_staleness
        bound = _BOUND if bound is None else bound
        return bound if self.engine else min(bound, 1)

    @classmethod
    def elsewhere(cls, name: str) -> str | None:
        """Where a setting of the runtime is set, which a training reads beside these."""
        from nano_coder.config import AgentConfig

        if name not in AgentConfig.model_fields:
            return None
        return f"no such setting of a training; set it in nano.toml, or as NANO_{name.upper()}"

    @field_validator("engine", mode="before")
    @classmethod
    def _urls(cls, urls: Any) -> Any:
        if not isinstance(urls, str | list | tuple) or not all(isinstance(url, str) for url in urls):
            return urls
        each = urls.split(",") if isinstance(urls, str) else ",".join(urls).split(",")
        named = tuple(dict.fromkeys(url.strip().rstrip("/") for url in each if url.strip()))
        if len(named) == 1 and named[0].partition(":")[0] == "vllm":
            return named
        if wrong := [url for url in named if not url.startswith(("http://", "https://"))]:
            raise ValueError(f"{wrong[0]!r} is no URL; give http://HOST:PORT/v1, or vllm:PYTHON alone")
        return named

    def rollout_ranks(self, ranks: int) -> int:
        """How many of the ranks of torchrun roll out, from rank 0 on."""
        if self.engine or self.off_policy_bound or not self.group_size:
            return 1
        return min(ranks, self.rollout_workers or ranks)

    def idle(self, given: Collection[str], *, from_logs: bool = False) -> Iterator[str]:
        """A sentence for each of the settings by their dotted names that cannot act, though nothing is wrong
        with them."""
        named = [name for name in ("clip_low", "clip_high") if f"objective.{name}" in given]
        if named and self.updates_per_step == 1 and self.minibatches == 1:
            yield (
                f"{', '.join(named)} cannot act: with one update a step every ratio is 1, and nothing has"
                " moved that could be clipped; set updates_per_step or minibatches above 1 for a clip that"
                " does"
            )
        needed = {
            "objective.max_staleness": (self.asynchronous or from_logs, "--async or --from-logs"),
            "imitate": (self.lambda_sft > 0, "lambda_sft above 0"),
            "scheduler": (not self.engine, "rollouts of this process, without engine"),
            "rollout_workers": (self.ray or "WORLD_SIZE" in os.environ, "--ray or under torchrun"),
        }
        for name in (name for name in needed if name in given):
            acts, condition = needed[name]
            if not acts:
                yield f"{name} cannot act here: it is read with {condition}"

    @model_validator(mode="after")
    def _comparable(self) -> TrainConfig:
        if self.objective.terms.critic:
            return self
        for name in ("group_size", "reflect"):
            if getattr(self, name) == 1:
                raise ValueError(
                    f"{name} = 1: a group of 1 has nothing to be compared with, so every advantage would be"
                    " 0; use at least 2, or objective = ppo"
                )
        return self

    @model_validator(mode="after")
    def _possible(self) -> TrainConfig:
        for name in ("asynchronous", "engine", "reflect", "refill"):
            if getattr(self, name) and not self.group_size:
                raise ValueError(
                    f"`{name}` is about fresh rollouts, and group_size = 0 rolls out none: leave one of them"
                    " out"
                )
        if self.ray and not self.engine:
            raise ValueError(
                "`ray` places agents on other machines, whose tokens come from servers: give --engine URL,"
                " or leave `ray` out"
            )
        if self.ray and not self.engine[0].startswith("http"):
            raise ValueError(
                "`ray` needs servers that its machines reach, and vllm:PYTHON is reached from here alone:"
                " start vLLM there, and give --engine URL"
            )
        if self.rollout_workers and self.engine and not self.ray:
            raise ValueError(
                "`rollout_workers` are actors of `ray`: give --ray auto, or leave `rollout_workers` out"
            )
        if self.off_policy_bound and self.objective.terms.tis_cap is None:
            raise ValueError(
                "`asynchronous` learns from rollouts of older versions, which importance weights correct, and"
                f" objective = {self.objective.objective} has none: leave one of them out"
            )
        if self.reflect and self.ray:
            raise ValueError("`reflect` is for agents of this process: leave out `ray`")
        if self.optimizer.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps is above steps = {self.steps}, so the learning rate would never reach its"
                " peak: give fewer of them, or more steps"
            )
        if self.objective.terms.normalise == "each" and self.reward is None:
            raise ValueError("`normalise` = each needs a reward of several parts: give --reward")
        return self


class SftConfig(OfflineConfig):
    max_tokens: int = Field(1500, ge=1)
    """tokens of one micro-batch, a prefix that rows share counted once (without trees: padded positions)"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass, which takes less memory and more time"""
    quantise: Quantise | None = None
    """load the base of a LoRA adapter in 4 or 8 bits (bitsandbytes)"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, schedule="linear", warmup_steps=10)
