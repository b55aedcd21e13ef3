"""A till: what the toy walkthrough is about."""

from dataclasses import dataclass, field
from functools import wraps

VAT_PERCENT = 20


def noted(function):
    @wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@dataclass
class Basket:
    """What one customer buys."""

    name: str
    prices: list[int] = field(default_factory=list)


class Till:
    """Adds up baskets.

    basket -> ring_up -> total
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.num_baskets = 0

    @noted
    def ring_up(self, basket: Basket) -> int:
        """Add a basket to the total."""
        subtotal = 0
        # The loop that the walkthrough stops in.
        for price in basket.prices:
            cost = price * 2
            subtotal += cost
            if subtotal > self.limit:
                raise ValueError("too much")
        self.total += subtotal
        self.num_baskets += 1
        return subtotal

    def serve(self, baskets: list[Basket]) -> list[int]:
        results = []
        for basket in baskets:
            result = self.ring_up(basket)
            results.append(result)
        return results


def with_vat(net: int) -> float:
    """Net price -> gross price."""
    return net * (100 + VAT_PERCENT) / 100
