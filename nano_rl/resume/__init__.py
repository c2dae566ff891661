"""All that a training needs to go on bit for bit."""
