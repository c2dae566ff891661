"""Policies behind an API: OpenAI's chat completions."""
