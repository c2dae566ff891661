"""The agent: its loop, prompts, profiles, dialects and observations."""
