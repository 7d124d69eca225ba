"""A mistake in a fleet file, as checks find it: the way to its key, and a sentence."""

from dataclasses import dataclass

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake; `path` leads to it, `at_key` when the key itself is wrong rather than its value."""

    path: KeyPath
    message: str
    at_key: bool = False
