"""The web viewer: runs, groups and trainings, served or written as one file."""
