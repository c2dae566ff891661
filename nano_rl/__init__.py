"""nano-rl, the producer: trains the policy on logs and fresh rollouts."""

__all__: list[str] = []
