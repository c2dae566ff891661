def count_positive(values):
    """Count the numbers in values that are positive."""
    return len([value for value in values if value > 0])


def mean_at_most(values):
    """Return the mean of the numbers in values that are at most 8, rounded down; 0 if there are none."""
    kept = [value for value in values if value <= 8]
    if not kept:
        return 0
    return sum(kept) // len(kept)


def spread_odd(values):
    """Return the largest minus the smallest of the numbers in values that are odd; 0 if there are none."""
    kept = [value for value in values if value % 2 == 1]
    if not kept:
        return 0
    return max(kept) + min(kept)
