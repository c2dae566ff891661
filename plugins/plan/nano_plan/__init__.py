"""What a training takes, before anything is loaded."""
