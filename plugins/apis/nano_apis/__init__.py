"""OpenAI completions and responses, and Anthropic messages, for nano-coder serve."""
