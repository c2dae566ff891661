"""What is done with a log: redaction, transfer, statistics, deletion, feedback, notes."""
