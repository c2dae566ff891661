"""Token trees: every shared prefix of a batch is forwarded once."""
