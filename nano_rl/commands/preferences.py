"""`nano-rl preferences`: pairs of runs, one of which is preferred."""

from __future__ import annotations

from nano_shared.command_line import LazyGroup

COMMANDS = {
    "build": ("nano_rl.commands.preferences_build", "Preference pairs out of the log, into a file."),
}

command = LazyGroup("preferences", COMMANDS, help="Make preference pairs.")
