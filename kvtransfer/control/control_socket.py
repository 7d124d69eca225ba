"""Feed of an engine: its line to its keeper, a Unix socket with one JSON object a line.

A connection begins with a `FeedCommand`. `states` is answered with an `EngineState` at once, when something
changed, at most every 50 ms, and at least every second, for as long as both sides live; every other command
with one `Reply`. The server runs in a thread of the scheduler's process, so that it answers while the engine
is idle: what a command means for bookkeeping happens at once, what it means for blocks in the engine's next
step.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtransfer import KVTransferError
from placement.engines import EngineState

logger = logging.getLogger("conserve.kvtransfer.feed")

VERSION = 6  # of what both sides understand; an engine of another is not adopted but started again
STATES = "states"
SHORTEST_S = 0.05
LONGEST_S = 1.0
MAX_LINE = 12 << 20  # NAMED_AT_MOST ids of 512 bytes, confirmed, parked, unparked, however they are escaped
REPLY_S = 5.0
OPEN_S = 10.0
CLOSE_S = 2.0
NAMED_S = 3.0  # for so long a conversation stays in the reports that name it
NAMED_AT_MOST = 1000


@dataclass(frozen=True, slots=True)
class FeedCommand:
    command: str
    conversation: str = ""
    draining: bool = False
    due_in_s: float = 0.0  # of a prefetch: seconds until the next turn is expected
    epoch: int = 0  # of a split
    members: tuple[str, ...] = ()  # host:port of each one's peer server, in the order of their parts
    part: int = 0  # of the layers, the one that is kept


@dataclass(frozen=True, slots=True)
class Reply:
    done: bool = False
    faults: tuple[str, ...] = ()
    error: str = ""


Handler = Callable[[FeedCommand], Reply]

_decode_command = msgspec.json.Decoder(FeedCommand).decode
_decode_reply = msgspec.json.Decoder(Reply).decode
_decode_state = msgspec.json.Decoder(EngineState).decode


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
        self._told = False  # of a change that no report has yet
        self._stopping = asyncio.Event()
        self._keepers: set[asyncio.StreamWriter] = set()
        self._opened = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="kv-feed", daemon=True)
        self._thread.start()
        if not self._opened.wait(OPEN_S):
            raise OSError(f"the feed cannot listen on {path}")

    def notify(self) -> None:
        """Something changed. From any thread: each step says so, and to wake the feed's takes the lock of the
        interpreter away from it. Once is enough until the next report."""
        if not self._told:
            self._told = True
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
            self._told = False  # before the state is read: what changes meanwhile is told again
            if self._keepers:
                line = _line(self._snapshot())
                for keeper in self._keepers:
                    if keeper.transport.get_write_buffer_size() < MAX_LINE:  # one that is slow gets the next
                        keeper.write(line)
            await asyncio.sleep(SHORTEST_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = self._answer(await reader.readline())
            if reply is not None:
                writer.write(_line(reply))
                await writer.drain()
                return
            self._keepers.add(writer)
            self._changed.set()
            await reader.read()  # until the keeper goes
        except (ConnectionError, ValueError) as error:  # ValueError: a line above the limit
            logger.warning("feed connection ended: %s", error)
        except asyncio.CancelledError:
            pass  # the engine ends: nobody awaits this task, and asyncio would log it as an error
        finally:
            self._keepers.discard(writer)
            writer.close()

    def _answer(self, line: bytes) -> Reply | None:
        """None: this connection is for states."""
        try:
            command = _decode_command(line)
        except msgspec.MsgspecError as error:
            return Reply(error=f"not a command: {error}")
        if command.command == STATES:
            return None
        handler = self._commands.get(command.command)
        if handler is None:
            return Reply(error=f"not a command; known are {', '.join(sorted(self._commands))}")
        try:
            return handler(command)
        except Exception as error:  # whatever it is: the keeper is told, and the next command is answered
            logger.exception("command %s of the keeper failed", command.command)
            return Reply(error=f"{command.command} failed: {error!r}")
        finally:
            self._changed.set()


class FeedError(KVTransferError, ConnectionError):
    """The engine's feed ended, refused a command, or did not answer in time."""


class EngineFeed:
    """The keeper's side: a connection for the states, and one for each command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def states(self) -> AsyncIterator[EngineState]:
        """Until the engine ends. Who reads slowly is told less often: the engine skips some."""
        async with self._say(FeedCommand(STATES)) as engine:
            while line := await engine.readline():
                yield _decode_state(line)

    async def release(self, conversation: str) -> bool:
        """The conversation ended. Whether the engine held any KV of it."""
        return (await self._ask(FeedCommand("release", conversation))).done

    async def prefetch(self, conversation: str, due_in_s: float) -> bool:
        """Load a parked conversation's KV for a turn that is expected in `due_in_s`.

        Returns False if the engine does not have most of it any more.
        """
        return (await self._ask(FeedCommand("prefetch", conversation, due_in_s=due_in_s))).done

    async def drain(self, draining: bool = True) -> None:
        await self._ask(FeedCommand("drain", draining=draining))

    async def drop(self, epoch: int, members: tuple[str, ...], part: int) -> None:
        """Keep a part of the layers, and share the others with the other members, which are told the same.
        The states say what became of it (`split`)."""
        await self._ask(FeedCommand("drop", epoch=epoch, members=members, part=part))

    async def restore(self, epoch: int) -> None:
        """Have all layers again."""
        await self._ask(FeedCommand("restore", epoch=epoch))

    async def check(self) -> tuple[str, ...]:
        """Faults of the integrity check; an engine that is not idle has none to tell."""
        return (await self._ask(FeedCommand("check"))).faults

    async def _ask(self, command: FeedCommand) -> Reply:
        async with self._say(command) as engine:
            reply = _decode_reply(await asyncio.wait_for(engine.readline(), REPLY_S))
        if reply.error:
            raise FeedError(reply.error)
        return reply

    @asynccontextmanager
    async def _say(self, command: FeedCommand) -> AsyncIterator[asyncio.StreamReader]:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_LINE)
            try:
                writer.write(_line(command))
                yield reader
            finally:
                writer.close()
        except (OSError, ValueError) as error:  # of these: time-outs, and no message of ours
            raise FeedError(f"{self._path} does not answer {command.command}: {error!r}") from error


def _line(message: FeedCommand | Reply | EngineState) -> bytes:
    return msgspec.json.encode(message) + b"\n"
