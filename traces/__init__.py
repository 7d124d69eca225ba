"""Workloads of agents as data, and the errors of reading and playing them."""


class TraceError(Exception):
    """Base of this package's exceptions; raised itself for wrong content, with file and line."""


class NotATrace(TraceError):
    """A file of another format."""


class ReplayError(TraceError):
    """Failure of a replay or of one of its turns; the message says what to look at."""
