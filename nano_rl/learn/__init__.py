"""Learning: samples, batches, credit, objectives, the loss, and updates of a model. Imports no nano_coder."""
