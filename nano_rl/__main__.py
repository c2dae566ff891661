"""`python -m nano_rl`, which `torchrun -m nano_rl train ...` starts on every rank."""

from __future__ import annotations

from nano_rl.cli import main

if __name__ == "__main__":
    main()
