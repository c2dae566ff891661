"""nano_coder, the agent runtime: runs tasks, logs every execution, and serves policies."""

from nano_shared import __version__

__all__ = ["__version__"]
