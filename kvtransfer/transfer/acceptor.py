"""A listener's connections, each served by a thread of its own, no more than so many at once."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("conserve.kvtransfer.transfer")

ACCEPT_AGAIN_S = 0.1


class Acceptor:
    """Accepts until it is closed, whatever a single connection or the system does."""

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket, object], None], most: int, name: str
    ) -> None:
        """`serve` has a connection and its address; it closes the connection."""
        self._listener, self._serve, self._name = listener, serve, name
        self._slots = threading.BoundedSemaphore(most)
        self._closed = False
        threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone wakes nobody who waits in `accept`
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                peer, address = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._not_accepted(error)  # no file descriptor left, say
                continue
            try:
                threading.Thread(
                    target=self._served, args=(peer, address), name=self._name, daemon=True
                ).start()
            except RuntimeError as error:  # no thread left
                peer.close()
                self._not_accepted(error)

    def _not_accepted(self, error: Exception) -> None:
        self._slots.release()
        logger.warning("%s: a connection could not be accepted: %s", self._name, error)
        time.sleep(ACCEPT_AGAIN_S)

    def _served(self, peer: socket.socket, address: object) -> None:
        try:
            self._serve(peer, address)
        finally:
            self._slots.release()
