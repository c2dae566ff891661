import unittest

from leap import leap_year


class LeapTest(unittest.TestCase):
    def test_century(self):
        assert leap_year(1900) is False

    def test_fourth(self):
        assert leap_year(1996) is True
