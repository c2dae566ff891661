"""Credit: from the rewards of a group to the advantage of each turn and token."""
