def sum_minus_middle(values: list[int]) -> int:
    """Return the sum of values minus the middle of values when sorted."""
    return sum(values) + sorted(values)[len(values) // 2]


def smallest_times_largest(values: list[int]) -> int:
    """Return the smallest of values times the largest of values."""
    return min(values) * max(values)
