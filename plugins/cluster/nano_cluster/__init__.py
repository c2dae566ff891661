"""Training on several processes and machines. A leaf: the command line alone imports it."""
