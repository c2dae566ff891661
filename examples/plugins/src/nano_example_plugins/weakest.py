"""A curriculum: which tasks come next, from the results so far. Its state goes on with the training."""

from statistics import fmean


class Weakest:
    def __init__(self, tasks, seed):
        self.tasks, self.success = tasks, {}

    def draw(self, step, count, *, taken=()):
        """The tasks that have earned least so far; first those that were never drawn."""
        free = [task for task in self.tasks if task.key not in taken]
        return sorted(free, key=lambda task: self.success.get(task.key, -1.0))[:count]

    def record(self, groups):
        for group in groups:
            scored = [reward for reward in group.rewards_G if reward == reward]  # not NaN
            self.success[group.task_key] = fmean(scored) if scored else 0.0

    def state(self):
        return self.success

    def restore(self, state):
        self.success = dict(state)
