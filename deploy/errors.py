"""Errors of a fleet's file, start, change and end."""

from dataclasses import dataclass


class DeployError(Exception):
    """A request that cannot be fulfilled; the message says why and what to do."""


class LifecycleError(DeployError):
    """The fleet cannot be brought up or down, or changed, as asked."""


class ActorLost(LifecycleError):
    """A part of the fleet ended while the fleet started."""


KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a fleet file.

    `path` leads to it; with `at_key` the key itself is wrong rather than its value.
    """

    path: KeyPath
    message: str
    at_key: bool = False
