"""Policies: who completes a conversation."""

from nano_coder.policies.endpoint import EndpointPolicy
from nano_coder.policies.scripted import ScriptedPolicy

__all__ = ["EndpointPolicy", "ScriptedPolicy"]
