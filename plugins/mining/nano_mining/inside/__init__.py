"""Programs that run inside a jail, read as text and never imported by the trainer."""
