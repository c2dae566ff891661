"""`nano-rl tasks`: make task files, check them, list them; each subcommand in a module of its own."""

from __future__ import annotations

from nano_shared.command_line import LazyGroup

COMMANDS = {
    "make": ("nano_rl.commands.tasks_make", "Make tasks of a suite into a file."),
    "check": ("nano_rl.commands.tasks_check", "Which tasks are fit to train on, and why the others are not."),
    "import": ("nano_rl.commands.tasks_import", "Tasks of another format, into a task file."),
    "export": ("nano_rl.commands.tasks_export", "A task file into another format."),
    "serve": ("nano_rl.commands.tasks_serve", "Tasks over HTTP, as NeMo Gym asks for them."),
    "from-log": ("nano_rl.commands.tasks_from_log", "Tasks of logged runs, into a task file."),
    "list": ("nano_rl.commands.tasks_list", "What is in a task file, or which suites there are."),
}

command = LazyGroup(
    "tasks", COMMANDS, help="Make, check, list, import, export and serve tasks, or take them from the log."
)
