"""One small extension of nano for each of its extension points."""
