"""`python -m nano_rl`, which `torchrun -m nano_rl train ...` starts on every rank."""

from __future__ import annotations

import os

from nano_rl.cli import cli, main
from nano_shared.command_line import run_command

if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started several of us
        from nano_rl.learn.learner import run_on_ranks

        run_command(cli, through=run_on_ranks)
    else:
        main()
