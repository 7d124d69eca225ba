"""Orders in which variants alternate, so that a drift of the machine affects all of them alike."""

from collections.abc import Sequence
from typing import TypeVar

Variant = TypeVar("Variant")


def rotated(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Return the variants in rotated order: each round begins with the next variant."""
    first = number % max(len(variants), 1)
    return [*variants[first:], *variants[:first]]


def forth_and_back(variants: Sequence[Variant], number: int) -> list[Variant]:
    """Return the variants in order in rounds of even `number`, and in reverse order in the others."""
    return list(variants) if number % 2 == 0 else list(reversed(variants))
