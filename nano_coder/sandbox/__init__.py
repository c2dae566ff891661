"""The sandbox: isolation for every program that a model runs."""

from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox

__all__ = ["ExecResult", "Jail", "Sandbox", "open_sandbox"]
