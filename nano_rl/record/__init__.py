"""What a training writes beside its checkpoints: command, events, times and rollouts."""
