"""Redaction: removes secrets from what is stored and exported, and keeps every token in its place.

`Redactor.scrub` is for a text, `trajectory.scrub_trajectory` for a run, `redactor.scrub_blob` and
`scrub_snapshot` for files; `store.RedactingStore` is a log that redacts on write.
"""
