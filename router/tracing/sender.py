"""A thread that sends what turns noted, every second or when there is much, over one connection.

Turns never wait for it: its queue has a limit, and what a slow or missing receiver does not take is dropped,
counted and said once for each time it begins.
"""

import http.client
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from router import metrics
from router.tracing.turn import TurnTrace

log = logging.getLogger(__name__)

MOST_WAITING = 2048  # turns
_MOST_AT_ONCE = 256  # turns in one message: some 200 kB
_EVERY_S = 1.0
_TRY_S = 5.0  # one try
_PAUSES_S = (0.5, 1.0, 2.0)  # between tries
_TRY_AGAIN = frozenset({429, 502, 503, 504})
_PATH = "/v1/traces"


class _Wrong(NamedTuple):
    why: str
    again: bool  # another try may help


class Sender:
    def __init__(
        self, endpoint: str, encode: Callable[[list[TurnTrace]], bytes], headers: Mapping[str, str]
    ) -> None:
        address = urlsplit(endpoint)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(address.hostname or "", address.port, timeout=_TRY_S)
        self._path = address.path.rstrip("/") + _PATH
        self._headers = {"content-type": "application/x-protobuf", **headers}
        self._encode = encode
        self._waiting: deque[TurnTrace] = deque()
        self._some, self._many, self._ending = threading.Event(), threading.Event(), threading.Event()
        self._dropping = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, turn: TurnTrace) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._dropped("queue_full", 1, f"more than {MOST_WAITING} turns wait")
            return
        self._waiting.append(turn)
        if not self._some.is_set():
            self._some.set()
        if len(self._waiting) == _MOST_AT_ONCE:
            self._many.set()

    def close(self, wait_s: float) -> None:
        """What waits is sent, for `wait_s` at most."""
        for reason in (self._ending, self._many, self._some):
            reason.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._some.wait()
            self._many.wait(_EVERY_S)  # more turns end meanwhile: one message for all of them
            self._some.clear()
            if not self._ending.is_set():
                self._many.clear()
            while self._waiting:
                count = min(len(self._waiting), _MOST_AT_ONCE)
                self._send([self._waiting.popleft() for _ in range(count)])
        self._connection.close()

    def _send(self, turns: list[TurnTrace]) -> None:
        try:
            wrong = self._try(self._encode(turns))
        except Exception:  # a fault of ours, or a header that cannot be sent: the thread goes on
            log.exception("spans could not be sent turns=%d", len(turns))
            self._connection.close()
            self._dropped("not_sent", len(turns), "see the traceback")
            return
        if wrong is None:
            self._dropping = False
        else:
            self._dropped("not_taken", len(turns), wrong.why)

    def _try(self, body: bytes) -> _Wrong | None:
        wrong = self._post(body)
        for pause_s in _PAUSES_S:
            if wrong is None or not wrong.again or self._ending.wait(pause_s):
                break
            wrong = self._post(body)
        return wrong

    def _post(self, body: bytes) -> _Wrong | None:
        try:
            self._connection.request("POST", self._path, body, self._headers)
            answer = self._connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as wrong:
            self._connection.close()  # the next request opens it again
            return _Wrong(str(wrong) or type(wrong).__name__, True)
        if answer.status < 300:
            return None
        return _Wrong(f"{answer.status} {answer.reason}", answer.status in _TRY_AGAIN)

    def _dropped(self, cause: str, turns: int, why: str) -> None:
        metrics.TRACES_DROPPED.labels(cause).inc(turns)
        if not self._dropping:
            self._dropping = True
            log.warning("traces of turns are dropped cause=%s why=%r", cause, why)
