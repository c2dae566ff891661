"""`nano-rl`: the commands, each imported only when it is called."""

from __future__ import annotations

from functools import partial

from nano_shared.command_line import lazy_app, run_command

COMMANDS = {
    "tasks": ("nano_rl.cli:tasks", "Make and list tasks."),
    "rollout": ("nano_rl.commands.rollout", "Run a policy on tasks and log every execution."),
    "sft": ("nano_rl.commands.sft", "Imitation: oracles, successes in the log, or conversations."),
    "admit": ("nano_rl.commands.admit", "What the log can teach, and why not more."),
    "train": ("nano_rl.commands.train", "Policy gradients, on fresh rollouts and on the log."),
    "cluster": ("+cluster", "The Ray workers of running trainings."),
    "preferences": ("nano_rl.cli:preferences", "Pairs of runs, one of which is preferred."),
    "reward-model": (
        "+preferences",
        "A model of which run people would prefer.",
    ),
    "dpo": ("+preferences", "From preference pairs straight to the policy."),
    "vision": ("+vision", "A vision-language model, from logged runs that show images."),
    "plan": ("+plan", "Memory and speed of a training, before anything is loaded."),
    "eval": ("nano_rl.commands.eval", "Success on tasks, with confidence intervals."),
    "export": ("+formats", "Rows of tokens with advantages, for other trainers."),
    "grade": ("nano_rl.commands.grade", "Grade a folder, or logged runs without running them again."),
    "report": ("+view", "How a training went, and how much it hacked."),
    "conformance": ("+conformance", "Hold our losses, or yours, against a published suite."),
    "improve": ("nano_rl.commands.improve", "Make the policy better at one project, unattended."),
    "checkpoints": ("nano_rl.commands.checkpoints", "List checkpoints, show one, promote one."),
}

TASKS = {
    "make": ("+suites", "Make tasks of a suite into a file."),
    "check": ("+mining", "Which tasks are fit to train on, and why the others are not."),
    "import": ("+formats", "Tasks of another format, into a task file."),
    "export": ("+formats", "A task file into another format."),
    "serve": ("+formats", "Tasks over HTTP, as NeMo Gym asks for them."),
    "from-log": ("nano_rl.commands.tasks:from_log", "Tasks of logged runs, into a task file."),
    "mine": ("+mining", "Tasks out of Python packages that have tests."),
    "list": ("+suites", "What is in a task file, or which suites there are."),
}

cli = lazy_app("nano-rl", COMMANDS, help="Train the policy from its own executions.")

tasks = lazy_app(
    "nano-rl.tasks",
    TASKS,
    help="Make, check, list, import, export and serve tasks, or take them from logs and packages.",
)
preferences = lazy_app(
    "nano-rl.preferences",
    {"build": ("+preferences", "Preference pairs out of the log, into a file.")},
    help="Make preference pairs.",
)
main = partial(run_command, cli, on_ranks="nano_rl.learn.learner:run_on_ranks")
