"""The server: OpenAI and Anthropic APIs over any policy, every request logged as a run."""
