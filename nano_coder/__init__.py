"""nano-coder, the consumer: an agent runtime that logs every execution exactly."""

__version__ = "0.1.0"
__all__ = ["__version__"]
