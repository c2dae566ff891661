"""Settings of the parts of an update: optimizer, guards, critic, and what stale tokens may do."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nano_rl.learn.config.objective import Config, ObjectiveConfig

Schedule = Literal["constant", "linear", "cosine"]


class OptimizerConfig(Config):
    """AdamW and its learning rate."""

    learning_rate: float = Field(1e-5, gt=0)
    """peak, reached after the warm-up"""
    schedule: Schedule = "constant"
    """of the learning rate after the warm-up: constant, or down to 0 along a line or half a cosine"""
    warmup_steps: int = Field(0, ge=0)
    """steps in which the learning rate rises to its peak"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, of matrices alone"""
    grad_clip: float = Field(1.0, gt=0)
    """largest norm of the gradient over all trained weights"""


class GuardConfig(Config):
    """When a run stops by itself."""

    mismatch_max: float = Field(1e-4, gt=0)
    """largest |log-prob of sampler - of trainer| of any fresh token, nats, where the weights are float32"""
    mismatch_mean: float = Field(0.02, gt=0)
    """largest mean of the same, nats, where the weights are bfloat16"""
    patience: int = Field(3, ge=1)
    """steps in a row without any signal, all cut off or collapsed, before the run stops"""
    entropy_min: float = Field(1e-3, ge=0)
    """mean entropy of the trained tokens, nats, under which the policy has collapsed; 0 lets it"""
    shift_max: float = Field(5.0, gt=0)
    """largest mean change of a row's log-probs by one update, nats: beyond it the learning rate diverges"""


class CriticConfig(Config):
    """PPO's critic: advantages by generalised advantage estimation instead of by comparison in a group."""

    gae_lambda: float = Field(1.0, ge=0, le=1)
    """of generalised advantage estimation, a sampled token: 1 trusts the returns, 0 the critic, which below 1
    has to know more than it learns in tens of steps"""
    discount: float = Field(1.0, gt=0, le=1)
    """of what follows, a sampled token"""
    value_clip: float | None = Field(0.2, gt=0)
    """how far a value may move in a step before its loss stops falling; None does not clip"""
    whiten: bool = True
    """advantages are brought to mean 0 and deviation 1 over the sampled tokens of a step"""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    """of the critic, which has a network of its own"""


class LogsConfig(Config):
    """What --from-logs takes of the logs in a step. Other trainings do not read it."""

    mix: float = Field(0.5, gt=0, le=1)
    """largest share of logged runs in a group that fresh rollouts fill up; a task whose logged runs are used
    up goes on with fresh ones alone"""
    uses: int | None = Field(1, ge=1)
    """times that a logged run may be learned from, by this policy and those that it comes from. None: any"""
    min_ess: float = Field(0.5, ge=0, le=1)
    """least effective sample size of a step's logged tokens, as a share of them: the runs that the policy has
    moved farthest from leave until it is reached; 0 keeps all"""
    max_drift: float | None = Field(0.5, gt=0)
    """mean |log weight| of a stale run's tokens, nats, above which it leaves the step. None: any"""
    unknown_age: Literal["refuse", "admit"] = "refuse"
    """logged runs of policies that this one does not come from"""
    largest_group: int = Field(16, ge=2)
    """logged runs of a task in one step, where no fresh ones join; the others come in later steps"""


class UpdateConfig(Config):
    """What the updates of a training read."""

    steps: int = Field(40, ge=1)
    """rounds of gathering groups and learning from them"""
    max_tokens: int = Field(4096, ge=1)
    """tokens of one micro-batch, a prefix that rows share counted once (without trees: padded positions)"""
    lora_rank: int = Field(0, ge=0)
    """0 trains all weights"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of the weights; those that are trained keep a float32 copy, which takes the updates"""
    seed: int = Field(0, ge=0)
    """of tasks, rollouts and adapters: the same one repeats a training"""
    shuffle_rewards: bool = False
    """negative control: rewards are permuted over the step, so nothing can be learned"""
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4)
    guards: GuardConfig = GuardConfig()
    updates_per_step: int = Field(1, ge=1)
    """passes over the rollouts of a step; the ratio to the weights before the first is clipped"""
    minibatches: int = Field(1, ge=1)
    """parts of a pass, of whole groups, with an update of the weights for each"""
    critic: CriticConfig = CriticConfig()
    """what objective = ppo learns beside the policy"""
    logs: LogsConfig = LogsConfig()
