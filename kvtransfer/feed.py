"""The engine's line to its keeper: a Unix socket, one JSON object a line.

Engine to keeper: `{"type": "state", ...}`, the fields of `EngineState`: when something changed, at most every
50 ms, and at least every second. Keeper to engine: `{"type": COMMAND, "id": N, ...}`, answered with
`{"type": "reply", "id": N, "done": ...}`. The server runs in a thread of the scheduler's process, so that
it answers while the engine is idle: what a command means for bookkeeping happens at once, what it means for
blocks in the engine's next step.
"""

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from placement.engines import EngineState

logger = logging.getLogger("conserve.kvtransfer.feed")

SHORTEST_S = 0.05
LONGEST_S = 1.0
MAX_LINE = 1 << 20
REPLY_S = 5.0
OPEN_S = 10.0
CLOSE_S = 2.0

Command = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class FeedServer:
    """`snapshot` and the commands are called in the feed's thread; they take what locks they need."""

    def __init__(
        self, path: Path, snapshot: Callable[[], EngineState], commands: Mapping[str, Command]
    ) -> None:
        self._path = path
        self._snapshot = snapshot
        self._commands = commands
        self._loop: asyncio.AbstractEventLoop
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._keepers: set[asyncio.StreamWriter] = set()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="kv-feed", daemon=True)
        self._thread.start()
        if not self._opened.wait(OPEN_S):
            raise OSError(f"the feed cannot listen on {path}")

    def notify(self) -> None:
        """Something changed. From any thread."""
        self._set(self._changed)

    def close(self) -> None:
        self._set(self._stopping)
        self._thread.join(CLOSE_S)
        self._path.unlink(missing_ok=True)

    def _set(self, event: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(event.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._path.unlink(missing_ok=True)  # of an engine that was killed
        server = await asyncio.start_unix_server(self._serve, str(self._path), limit=MAX_LINE)
        os.chmod(self._path, 0o600)
        self._opened.set()
        pushing = asyncio.create_task(self._push())
        await self._stopping.wait()
        pushing.cancel()
        server.close()
        for keeper in list(self._keepers):
            keeper.close()

    async def _push(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LONGEST_S)
            self._changed.clear()
            if self._keepers:
                line = _line({"type": "state", **asdict(self._snapshot())})
                for keeper in list(self._keepers):
                    if keeper.transport.get_write_buffer_size() > MAX_LINE:
                        logger.warning("a keeper does not read its feed: dropped")
                        self._keepers.discard(keeper)
                        keeper.transport.abort()
                    else:
                        keeper.write(line)
            await asyncio.sleep(SHORTEST_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keepers.add(writer)
        self._changed.set()
        try:
            while line := await reader.readline():
                writer.write(_line(self._answer(line)))
                await writer.drain()
        except (ConnectionError, ValueError) as error:  # ValueError: a line above the limit
            logger.warning("feed connection ended: %s", error)
        except asyncio.CancelledError:
            pass  # the engine ends: nobody awaits this task, and asyncio would log it as an error
        finally:
            self._keepers.discard(writer)
            writer.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            message = dict(json.loads(line))
        except (ValueError, TypeError):
            return {"type": "reply", "id": None, "error": "not a JSON object"}
        reply = {"type": "reply", "id": message.get("id")}
        command = self._commands.get(str(message.get("type")))
        if command is None:
            return {**reply, "error": f"not a command; known are {', '.join(sorted(self._commands))}"}
        try:
            answer = command(message)
        except (KeyError, TypeError) as error:
            return {**reply, "error": f"the command lacks {error}"}
        self._changed.set()
        return {**reply, **answer}


class FeedError(ConnectionError):
    """The engine's feed ended, refused a command, or did not answer in time."""


class EngineFeed:
    """The keeper's end. Use as `async with`; read `states()` in one task, send commands from any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: asyncio.Queue[EngineState | None] = asyncio.Queue(maxsize=64)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0

    async def __aenter__(self) -> "EngineFeed":
        self._reader, self._writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_LINE)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()

    async def states(self) -> AsyncIterator[EngineState]:
        """Ends when the engine does."""
        while (state := await self._states.get()) is not None:
            yield state

    async def release(self, conversation: str) -> bool:
        """The conversation ended. Whether the engine knew it."""
        return bool((await self._ask("release", conversation=conversation))["done"])

    async def park(self, conversation: str) -> bool:
        return bool((await self._ask("park", conversation=conversation))["done"])

    async def drain(self, draining: bool = True) -> None:
        await self._ask("drain", draining=draining)

    async def check(self) -> list[str]:
        """Faults of the integrity check; an engine that is not idle is asked again after its step."""
        return list((await self._ask("check"))["faults"])

    async def _ask(self, command: str, **fields: Any) -> dict[str, Any]:
        if self._reading.done():
            raise FeedError(f"the feed of {self._path} ended")
        self._next_id += 1
        reply = self._replies[self._next_id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_line({"type": command, "id": self._next_id, **fields}))
            answer: dict[str, Any] = await asyncio.wait_for(reply, REPLY_S)
        except (TimeoutError, ConnectionError) as error:
            raise FeedError(f"{command} was not answered by {self._path}") from error
        finally:
            self._replies.pop(self._next_id, None)
        if "error" in answer:
            raise FeedError(answer["error"])
        return answer

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if message.pop("type") == "state":
                    self._keep_newest(_state(message))
                elif (reply := self._replies.get(message["id"])) and not reply.done():
                    reply.set_result(message)
        except ConnectionError as error:
            logger.warning("feed of %s broke: %s", self._path, error)
        finally:
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(FeedError(f"the feed of {self._path} ended"))
            self._keep_newest(None)

    def _keep_newest(self, state: EngineState | None) -> None:
        """A slow reader loses the oldest state, never the conversations that were named in it."""
        if self._states.full():
            lost = self._states.get_nowait()
            if lost is not None and state is not None:
                state = _with_news_of(lost, state)
        self._states.put_nowait(state)


def _with_news_of(earlier: EngineState, state: EngineState) -> EngineState:
    confirmed = (*earlier.confirmed, *state.confirmed)
    return replace(state, confirmed=confirmed, parked=(*earlier.parked, *state.parked))


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


_STATE_FIELDS = frozenset(field.name for field in fields(EngineState))


def _state(message: Mapping[str, Any]) -> EngineState:
    values = {name: value for name, value in message.items() if name in _STATE_FIELDS}
    for news in ("confirmed", "parked"):
        values[news] = tuple(values.get(news, ()))
    return EngineState(**values)
