"""The rollout worker: prompt, action, observation, action, ... until the session is done, then the reward.

Here the loss mask is made. It is 1 exactly on tokens that the policy sampled: the prompt and the observations
are the environment's words, read and not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from environment import Environment, Task
from policy import END, Policy


@dataclass(slots=True)
class Trajectory:
    """The tokens of one run, in parallel lists."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 on tokens that are trained"""
    logprobs: list[float] = field(default_factory=list)
    """of each token when it was sampled, nats; 0 on tokens that were not"""
    reward: float = 0.0

    def append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)


Group = list[Trajectory]
"""runs of one task, whose rewards are compared"""


class RolloutWorker:
    def __init__(self, policy: Policy, environment: Environment, *, observation_mask: int = 0) -> None:
        """`observation_mask` = 1 is the exercise: the mistake that trains the policy on the tools' words."""
        self.policy = policy
        self.environment = environment
        self.observation_mask = observation_mask

    def rollout(self, tasks: Sequence[Task], group_size: int) -> list[Group]:
        """Run each task `group_size` times, all runs side by side."""
        sessions = [self.environment.start(task) for task in tasks for _ in range(group_size)]
        trajectories = [Trajectory() for _ in sessions]
        for session, trajectory in zip(sessions, trajectories, strict=True):
            trajectory.append(self.policy.encode(session.task.prompt), mask=0)
        while running := [i for i, session in enumerate(sessions) if not session.done]:
            completions = self.policy.complete([trajectories[i].ids for i in running])
            for i, completion in zip(running, completions, strict=True):
                trajectories[i].append(completion.ids, mask=1, logprobs=completion.logprobs)
                observation = sessions[i].step(self.policy.decode(completion.ids))
                trajectories[i].append(self.policy.encode(observation), mask=self.observation_mask)
        for session, trajectory in zip(sessions, trajectories, strict=True):
            trajectory.reward = session.grade()
        return [trajectories[i : i + group_size] for i in range(0, len(trajectories), group_size)]

    def demonstrate(self, task: Task, actions: Sequence[str]) -> Trajectory:
        """A trajectory to imitate: these actions were not sampled, so it has no log-probs."""
        session, trajectory = self.environment.start(task), Trajectory()
        trajectory.append(self.policy.encode(task.prompt), mask=0)
        for action in actions:
            trajectory.append(self.policy.encode(f"{action} {END}"), mask=1)
            trajectory.append(self.policy.encode(session.step(action)), mask=0)
        trajectory.reward = session.grade()
        return trajectory
