"""nano-coder, the consumer: an agent runtime that logs every execution exactly."""

from nano_shared import __version__

__all__ = ["__version__"]
