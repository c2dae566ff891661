from stats import smallest_times_largest, sum_minus_middle


def test_sum_minus_middle():
    assert sum_minus_middle([5, 1, 3]) == 6
    assert sum_minus_middle([4, 4, 9, 1]) == 14


def test_smallest_times_largest():
    assert smallest_times_largest([2, 7, 3]) == 14
    assert smallest_times_largest([-2, 5]) == -10
