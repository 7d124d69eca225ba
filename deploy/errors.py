"""Errors in a fleet file, and errors when a fleet starts, changes or ends."""

from dataclasses import dataclass


class DeployError(Exception):
    """Base of this package's errors; the message says why a request fails and what to do."""


class LifecycleError(DeployError):
    """The fleet cannot be started, changed or ended as requested."""


class ActorLost(LifecycleError):
    """Raised when an actor of the fleet ends while the fleet starts."""


KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a fleet file, at `path`. With `at_key` the key is wrong, otherwise its value."""

    path: KeyPath
    message: str
    at_key: bool = False
