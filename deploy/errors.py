"""Errors of a fleet's start, change and end."""


class DeployError(Exception):
    """Something cannot be done as asked; the text is a sentence that says why and what to do."""


class LifecycleError(DeployError):
    """The fleet cannot be brought up or down, or changed, as asked."""


class ActorLost(LifecycleError):
    """A part of the fleet ended while the fleet started."""
