"""Learning: samples, batches, credit, objectives, the loss and the update of one model."""
