"""What is maximised: one small file an objective, over pieces that they share."""
