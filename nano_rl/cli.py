"""`nano-rl`: the commands, each imported only when it is called."""

from __future__ import annotations

from nano_shared import __version__
from nano_shared.command_line import LazyGroup, run_command

COMMANDS = {
    "tasks": ("nano_rl.commands.tasks", "Make and list tasks."),
    "rollout": ("nano_rl.commands.rollout", "Run a policy on tasks and log every execution."),
    "sft": ("nano_rl.commands.sft", "Imitation: oracles, successes in the log, or conversations."),
    "admit": ("nano_rl.commands.admit", "What the log can teach, and why not more."),
    "train": ("nano_rl.commands.train", "Policy gradients, on fresh rollouts and on the log."),
    "preferences": ("nano_rl.commands.preferences", "Pairs of runs, one of which is preferred."),
    "reward-model": ("nano_rl.commands.reward_model", "A model of which run people would prefer."),
    "dpo": ("nano_rl.commands.dpo", "From preference pairs straight to the policy."),
    "eval": ("nano_rl.commands.eval", "Success on tasks, with confidence intervals."),
    "export": ("nano_rl.commands.export", "Preference pairs, or rows of tokens, for other trainers."),
    "grade": ("nano_rl.commands.grade", "Grade a folder, or logged runs without running them again."),
    "report": ("nano_rl.commands.report", "How a training went, and how much it hacked."),
    "conformance": ("nano_rl.commands.conformance", "Hold our losses, or yours, against a published suite."),
    "checkpoints": ("nano_rl.commands.checkpoints", "List checkpoints, show one, promote one."),
}

cli = LazyGroup("nano-rl", COMMANDS, help="Train the policy from its own executions.", version=__version__)


def main() -> None:
    run_command(cli)
