"""Feed of an engine: its line to its keeper, a Unix socket with one JSON object a line.

Engine to keeper: `{"state": {...}}`, an `EngineState`, when something changed, at most every 50 ms, and at
least every second. Keeper to engine: a `FeedCommand`, answered with `{"reply": {...}}`. The server runs in a
thread of the scheduler's process, so that it answers while the engine is idle: what a command means for
bookkeeping happens at once, what it means for blocks in the engine's next step.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtransfer.errors import KVTransferError
from placement.engines import EngineState

logger = logging.getLogger("conserve.kvtransfer.feed")

VERSION = 2  # of what both sides understand; an engine of another is not adopted but started again
SHORTEST_S = 0.05
LONGEST_S = 1.0
MAX_LINE = 8 << 20  # NAMED_AT_MOST ids of 512 bytes, confirmed and parked, however they are escaped
REPLY_S = 5.0
OPEN_S = 10.0
CLOSE_S = 2.0
NAMED_S = 3.0  # for so long a conversation stays in the reports that name it
NAMED_AT_MOST = 1000


@dataclass(frozen=True, slots=True)
class FeedCommand:
    command: str
    id: int
    conversation: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    id: int
    done: bool = False
    faults: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class FromEngine:
    """A line to the keeper: one of the two."""

    state: EngineState | None = None
    reply: Reply | None = None


Handler = Callable[[FeedCommand], Reply]

_commands = msgspec.json.Decoder(FeedCommand)
_lines = msgspec.json.Decoder(FromEngine)


class RecentlyNamed:
    """Conversations to which something happened lately, each with the report that named it first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._named: dict[str, tuple[int, float]] = {}  # the oldest first
        self.after = 0  # of reports later than this one, all that they named is here

    def add(self, conversations: Iterable[str], seq: int) -> None:
        now = self._clock()
        for key in conversations:
            self._named.pop(key, None)
            self._named[key] = (seq, now)
        while self._named:
            oldest = next(iter(self._named))
            named, at = self._named[oldest]
            if at >= now - NAMED_S and len(self._named) <= NAMED_AT_MOST:
                break
            del self._named[oldest]
            self.after = max(self.after, named)

    def all(self) -> dict[str, int]:
        return {key: seq for key, (seq, _) in self._named.items()}


class FeedServer:
    """`snapshot` and the commands are called in the feed's thread; they take what locks they need."""

    def __init__(
        self, path: Path, snapshot: Callable[[], EngineState], commands: Mapping[str, Handler]
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
                line = _line(FromEngine(state=self._snapshot()))
                for keeper in self._keepers:
                    if keeper.transport.get_write_buffer_size() < MAX_LINE:  # one that is slow gets the next
                        keeper.write(line)
            await asyncio.sleep(SHORTEST_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keepers.add(writer)
        self._changed.set()
        try:
            while line := await reader.readline():
                writer.write(_line(FromEngine(reply=self._answer(line))))
                await writer.drain()
        except (ConnectionError, ValueError) as error:  # ValueError: a line above the limit
            logger.warning("feed connection ended: %s", error)
        except asyncio.CancelledError:
            pass  # the engine ends: nobody awaits this task, and asyncio would log it as an error
        finally:
            self._keepers.discard(writer)
            writer.close()

    def _answer(self, line: bytes) -> Reply:
        try:
            command = _commands.decode(line)
        except msgspec.MsgspecError as error:
            return Reply(0, error=f"not a command: {error}")
        handler = self._commands.get(command.command)
        if handler is None:
            return Reply(command.id, error=f"not a command; known are {', '.join(sorted(self._commands))}")
        reply = handler(command)
        self._changed.set()
        return reply


class FeedError(KVTransferError, ConnectionError):
    """The engine's feed ended, refused a command, or did not answer in time."""


class EngineFeed:
    """The keeper's side. Read `states()` in one task, send commands from any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._newest: EngineState | None = None
        self._some = asyncio.Event()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
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
        """The newest each time: a slow reader skips some. Ends when the engine does."""
        while True:
            await self._some.wait()
            self._some.clear()
            state, self._newest = self._newest, None
            if state is not None:
                yield state
            if self._reading.done():
                return

    async def release(self, conversation: str) -> bool:
        """The conversation ended. Whether the engine knew it."""
        return (await self._ask("release", conversation=conversation)).done

    async def drain(self, draining: bool = True) -> None:
        await self._ask("drain", draining=draining)

    async def check(self) -> tuple[str, ...]:
        """Faults of the integrity check; an engine that is not idle has none to tell."""
        return (await self._ask("check")).faults

    async def _ask(self, name: str, *, conversation: str = "", draining: bool = False) -> Reply:
        if self._reading.done():
            raise FeedError(f"the feed of {self._path} ended")
        self._next_id += 1
        command = FeedCommand(name, self._next_id, conversation, draining)
        waiting = self._replies[command.id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_line(command))
            reply: Reply = await asyncio.wait_for(waiting, REPLY_S)
        except (TimeoutError, ConnectionError) as error:
            raise FeedError(f"{name} was not answered by {self._path}") from error
        finally:
            self._replies.pop(command.id, None)
        if reply.error:
            raise FeedError(reply.error)
        return reply

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = _lines.decode(line)
                if message.state is not None:
                    self._newest = message.state
                    self._some.set()
                if (reply := message.reply) is not None:
                    waiting = self._replies.get(reply.id)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(reply)
        except (ConnectionError, ValueError) as error:  # of these: no message of ours, a line over the limit
            logger.warning("feed of %s broke: %s", self._path, error)
        finally:
            for waiting in self._replies.values():
                if not waiting.done():
                    waiting.set_exception(FeedError(f"the feed of {self._path} ended"))
            asyncio.get_running_loop().call_soon(self._some.set)  # then this task is done


def _line(message: FeedCommand | FromEngine) -> bytes:
    return msgspec.json.encode(message) + b"\n"
