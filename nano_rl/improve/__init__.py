"""Improve: the policy gets better at one project, unattended: tasks, split, training, gate, watch."""
