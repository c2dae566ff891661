"""Policies behind an API: OpenAI's chat completions."""

from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.models.endpoint.policy import EndpointPolicy, open_endpoint

__all__ = ["EndpointError", "EndpointPolicy", "open_endpoint"]
