"""Agents' workloads as data, and the errors of reading and playing them."""


class TraceError(Exception):
    """Base of this package's exceptions; raised itself for wrong content, with file and line."""


class NotATrace(TraceError):
    """The file has another format."""


class ReplayError(TraceError):
    """A replay or one of its turns failed; the message says what to look at."""
