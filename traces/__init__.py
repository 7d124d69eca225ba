"""Workloads: what agents ask of a fleet, as data; and what goes wrong with them."""


class TraceError(Exception):
    """Base of this package's exceptions; raised itself for a file that does not say what it should: the
    message names file and line."""


class NotATrace(TraceError):
    """A file of another format."""


class ReplayError(TraceError):
    """The replay cannot go on, or one turn of it failed; the message says what to look at."""
