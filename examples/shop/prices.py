def with_tax(price, rate):
    """Return the price with tax added at a rate, for example 0.19."""
    return price - price * rate


def total(prices, rate):
    """Return the sum of the prices with tax."""
    return sum(with_tax(price, rate) for price in prices)
