"""Two customers pay at one till."""

from toyshop.till import Basket, Till, with_vat

till = Till(limit=100)


def main() -> None:
    baskets = [Basket("a", [1, 2]), Basket("b", [10, 20, 5])]
    for subtotal in till.serve(baskets):
        with_vat(subtotal)


if __name__ == "__main__":
    main()
