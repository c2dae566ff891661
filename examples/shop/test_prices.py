from prices import total, with_tax


def test_with_tax():
    assert with_tax(100, 0.25) == 125


def test_total():
    assert total([100, 60], 0.25) == 200
