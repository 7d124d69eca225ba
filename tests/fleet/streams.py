"""Reads a streamed answer in a thread, as a client would."""

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from tests.fleet.talk import CITY_TOOL


class ChatStream:
    """A streamed chat completion. `text` grows as it arrives; `error` is the error event, if one arrived."""

    def __init__(
        self,
        url: str,
        model: str,
        messages: list[dict[str, Any]],
        key: str,
        max_tokens: int,
        **more: Any,
    ) -> None:
        self.text = ""
        self.arguments = ""  # of the tools that it calls
        self.said: list[Any] = []  # finish reasons and usage
        self.error: dict[str, Any] | None = None
        self.finished = False  # ended as the protocol says: [DONE] after a finish reason, or an error event
        self.broken: Exception | None = None
        self.status = 0
        self.began = time.monotonic()
        self.seconds = 0.0
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=180)
        body = {
            "model": model,
            "messages": messages,
            "tools": [CITY_TOOL],  # part of the prompt, as in the turns before
            "tool_choice": "none",
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            **more,
        }
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._request = json.dumps(body).encode(), headers
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._connection.request("POST", "/v1/chat/completions", *self._request)
            self._socket = self._connection.sock
            answer = self._connection.getresponse()
            self.status = answer.status
            for line in answer:
                if line.startswith(b"data: "):
                    self._event(line[6:].strip())
        except (OSError, http.client.HTTPException) as error:
            self.broken = error
        finally:
            self.seconds = time.monotonic() - self.began
            self._connection.close()

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            self.finished = True
            return
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                self.arguments += call["function"].get("arguments") or ""
            if choice["finish_reason"]:
                self.said.append(choice["finish_reason"])
        if usage := event.get("usage"):
            self.said.append((usage["prompt_tokens"], usage["completion_tokens"]))

    def until_text(self, characters: int, limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while len(self.text) < characters:
            assert self._thread.is_alive(), f"the stream ended early: {self.text[-80:]!r} {self.broken}"
            assert time.monotonic() < deadline, "the stream does not begin"
            time.sleep(0.02)

    def leave(self) -> None:
        """Close the connection abruptly, as a killed client does."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)

    def end(self, limit_s: float) -> "ChatStream":
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"the stream hangs for {limit_s} s"
        return self
