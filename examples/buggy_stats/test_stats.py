# Program families, all of the test split, so that no training task shares one:
# numbers.count(list.positive) numbers.mean(list.le) numbers.spread(list.odd)
from stats import count_positive, mean_at_most, spread_odd


def test_count_positive():
    assert count_positive([3, -1, 0, 5]) == 2
    assert count_positive([]) == 0


def test_mean_at_most():
    assert mean_at_most([2, 5, 30]) == 3
    assert mean_at_most([8, 9]) == 8
    assert mean_at_most([20]) == 0


def test_spread_odd():
    assert spread_odd([3, 10, 9, 5]) == 6
    assert spread_odd([7]) == 0
    assert spread_odd([2, 4]) == 0
