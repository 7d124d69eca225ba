"""Reads, generates, replays and simulates agents' workloads. This file has the package's exceptions."""


class TraceError(Exception):
    """Base of this package's exceptions. It is itself raised for wrong content, with file and line."""


class NotATrace(TraceError):
    """The file is not in the format of this package."""


class ReplayError(TraceError):
    """A replay or one of its turns failed; the message says what to look at."""
