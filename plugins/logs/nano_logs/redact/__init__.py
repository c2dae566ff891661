"""Redaction: removes secrets from what is stored and exported, and keeps every token in its place."""
