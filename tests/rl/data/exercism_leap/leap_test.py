import unittest

from leap import leap_year


class LeapTest(unittest.TestCase):
    def test_century(self):
        self.assertIs(leap_year(1900), False)

    def test_fourth(self):
        self.assertIs(leap_year(1996), True)
