"""`nano-coder`: the commands, each imported only when it is called."""

from __future__ import annotations

from functools import partial

from nano_shared.command_line import lazy_app, run_command

COMMANDS = {
    "run": ("nano_coder.commands.run", "Run a task in a sandboxed copy of a directory."),
    "resume": ("nano_coder.commands.resume:resume", "Go on with a run that was killed or interrupted."),
    "say": ("nano_coder.commands.resume:say", "Go on with a run that has ended, with a further message."),
    "chat": ("nano_coder.commands.resume:chat", "Work on a directory in a conversation on the terminal."),
    "apply": ("nano_coder.commands.changes:apply", "Apply a run's changes to the directory it started from."),
    "diff": ("nano_coder.commands.changes:diff", "Show what a run changed."),
    "undo": ("nano_coder.commands.changes:undo", "Take back what applying a run did."),
    "restore": ("nano_coder.commands.changes:restore", "Write the workspace as a step of a run left it."),
    "fork": ("nano_coder.commands.resume:fork", "Sample other continuations from a step of a run."),
    "feedback": (
        "+logs",
        "Say what was good or bad about a run, or list what was said.",
    ),
    "log": ("nano_coder.commands.log", "Look at the log of runs."),
    "serve": ("+apis", "Serve a model to any client; every request is logged."),
    "view": ("+view", "Look at the log and at trainings in a browser."),
    "exec": ("+jails", "Run one command in the sandbox."),
    "doctor": ("+jails", "Prove what the sandbox holds here, by trying to escape."),
    "memory": ("+logs", "What agents remember of a project."),
    "mcp": ("+mcp", "MCP servers: their tools for the agent, and nano as one."),
    "tools": (
        "nano_coder.commands.config:tools",
        "List the tools that a run would offer, with their schemas.",
    ),
    "models": ("nano_coder.commands.config:models", "List the models that are at hand."),
    "trust": (
        "nano_coder.commands.config:trust_project",
        "Let a project's nano.toml choose model, log and all else.",
    ),
    "config": ("nano_coder.commands.config", "Show the configuration and where each value came from."),
}

cli = lazy_app("nano-coder", COMMANDS, help="A coding agent that logs every token it samples.")
main = partial(run_command, cli)
