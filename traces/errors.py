"""What can be wrong with a workload or a replay; a person reads the message."""


class TraceError(ValueError):
    """A trace file does not say what it should; the message names the file and the line."""


class NotATrace(TraceError):
    """A file of another format."""


class ReplayError(RuntimeError):
    """The replay cannot go on, or one turn of it failed; the message says what to look at."""
