"""Parts of a reward beyond the tests: conduct, size, lint, judges, principles, people, reward models."""
