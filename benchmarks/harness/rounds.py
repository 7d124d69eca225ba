"""Orders in which variants take turns, so that a drift of the machine meets all of them alike."""

from collections.abc import Sequence
from typing import TypeVar

Variant = TypeVar("Variant")


def rotated(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Return the variants beginning with another one in each round."""
    first = number % max(len(variants), 1)
    return [*variants[first:], *variants[:first]]


def forth_and_back(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Return the variants forwards in even rounds and backwards in odd ones: neighbours stay neighbours."""
    return list(variants) if number % 2 == 0 else list(reversed(variants))
