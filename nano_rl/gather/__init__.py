"""Where a step's groups come from: fresh rollouts, the log, the replay buffer, a curriculum."""
