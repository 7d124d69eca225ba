"""Logs of our processes: one line an event, as `time LEVEL logger event key=value ...`, to standard error.

What concerns a turn names its `conversation` and, once an engine has answered, its `request`: the id of the
answer, which the client has and the engine logs. No line holds text of a prompt or an answer.
"""

import logging
import time

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029)} | {
    10: "\\n",
    13: "\\r",
}


class OneLine(logging.Formatter):
    """Also what spans lines elsewhere: a traceback, or a path that a client chose with line breaks in it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._second, self._written = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:  # written once a second: a line took a third longer otherwise
            self._second, self._written = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._written}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if line.isprintable() else line.translate(_CONTROL)


def log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Our lines name neither thread nor process nor place in the code: to find them out was a third of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[assignment]  # documented: "Optimization" in logging's how-to
