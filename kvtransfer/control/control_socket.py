"""Control socket of an engine: a Unix socket to its keeper, with one JSON object per line.

A connection begins with an `EngineCommand`. The command `states` is answered with one `EngineState`
immediately, and with one after every change, at most every 50 ms and at least every second, for as long as
both sides live. Every other command is answered with one `Reply`. The server runs in a thread of the
scheduler's process, so that it answers while the engine is idle. It changes bookkeeping immediately, and
leaves blocks to the engine's next step.
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

logger = logging.getLogger("conserve.kvtransfer.control_socket")

VERSION = 7  # of the protocol; a keeper restarts an engine of another version instead of adopting it
STATES = "states"
MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0
MAX_LINE = 12 << 20  # fits NAMED_AT_MOST escaped ids of 512 bytes as confirmed, parked and unparked
REPLY_S = 5.0
OPEN_S = 10.0
CLOSE_S = 2.0
NAMED_S = 3.0  # how long reports name a changed conversation
NAMED_AT_MOST = 1000


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Command of the keeper, with fields for the arguments of all commands."""

    command: str
    conversation: str = ""
    draining: bool = False
    due_in_s: float = 0.0  # for a prefetch: seconds until the next turn is expected
    epoch: int = 0  # epoch of a split
    members: tuple[str, ...] = ()  # host:port of each member's peer server, in the order of their parts
    part: int = 0  # the part of the layers that this engine keeps


@dataclass(frozen=True, slots=True)
class Reply:
    """Engine's reply to one command of its keeper."""

    done: bool = False
    faults: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()  # tokens of a conversation
    salt: str = ""  # salt with which the conversation's blocks are hashed
    error: str = ""


Handler = Callable[[EngineCommand], Reply]

_decode_command = msgspec.json.Decoder(EngineCommand).decode
_decode_reply = msgspec.json.Decoder(Reply).decode
_decode_state = msgspec.json.Decoder(EngineState).decode


class RecentChanges:
    """Conversations that changed recently, each with the number of the report that first named it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._named: dict[str, tuple[int, float]] = {}  # the oldest first
        self.after = 0  # number of the last report of which a change may be missing here

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


class ControlSocketServer:
    """Engine's side of the socket, in a thread of its own.

    `snapshot` and the handlers of commands run in this thread, and take the locks that they need.
    """

    def __init__(
        self, path: Path, snapshot: Callable[[], EngineState], commands: Mapping[str, Handler]
    ) -> None:
        self._path = path
        self._snapshot = snapshot
        self._commands = commands
        self._loop: asyncio.AbstractEventLoop
        self._changed = asyncio.Event()
        self._notified = False  # a change happened that no report has yet
        self._stopping = asyncio.Event()
        self._keepers: set[asyncio.StreamWriter] = set()
        self._opened = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main()), name="kv-control", daemon=True
        )
        self._thread.start()
        if not self._opened.wait(OPEN_S):
            raise OSError(f"the control socket cannot listen on {path}")

    def notify(self) -> None:
        """Tell the socket's thread to report a change soon. Any thread may call this, and each step does.

        Waking the socket's thread takes the interpreter's lock from the step, so only the first change after
        a report wakes it.
        """
        if not self._notified:
            self._notified = True
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
        self._path.unlink(missing_ok=True)  # left by an engine that was killed
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
                await asyncio.wait_for(self._changed.wait(), MAX_INTERVAL_S)
            self._changed.clear()
            self._notified = False  # before the state is read: a change meanwhile causes another report
            if self._keepers:
                line = _line(self._snapshot())
                for keeper in self._keepers:
                    if keeper.transport.get_write_buffer_size() < MAX_LINE:  # a slow keeper skips states
                        keeper.write(line)
            await asyncio.sleep(MIN_INTERVAL_S)

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
            logger.warning("control connection ended: %s", error)
        except asyncio.CancelledError:
            pass  # the engine ends: nobody awaits this task, and asyncio would log it as an error
        finally:
            self._keepers.discard(writer)
            writer.close()

    def _answer(self, line: bytes) -> Reply | None:
        """Carry out the command in `line` and return its reply; None if the command is `states`."""
        try:
            command = _decode_command(line)
        except msgspec.MsgspecError as error:
            return Reply(error=f"not a command: {error}")
        if command.command == STATES:
            return None
        handler = self._commands.get(command.command)
        if handler is None:
            return Reply(error=f"not a command; the engine knows {', '.join(sorted(self._commands))}")
        try:
            return handler(command)
        except Exception as error:  # the keeper learns of it, and the next command is answered
            logger.exception("command %s of the keeper failed", command.command)
            return Reply(error=f"{command.command} failed: {error!r}")
        finally:
            self._changed.set()


class ControlSocketError(KVTransferError, ConnectionError):
    """The engine's control socket ended, refused a command, or did not answer in time."""


class ControlSocketClient:
    """Keeper's side of the socket: one connection for the states, and one per command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def states(self) -> AsyncIterator[EngineState]:
        """Yield the engine's states until the engine ends. A slow reader misses some states."""
        async with self._connected(EngineCommand(STATES)) as engine:
            while line := await engine.readline():
                yield _decode_state(line)

    async def release(self, conversation: str) -> bool:
        """End a conversation; return whether the engine knew it."""
        return (await self._ask(EngineCommand("release", conversation))).done

    async def prefetch(self, conversation: str, due_in_s: float) -> bool:
        """Make the engine load a parked conversation's KV for a turn expected in `due_in_s`.

        Returns False if the engine has less than half of the KV.
        """
        return (await self._ask(EngineCommand("prefetch", conversation, due_in_s=due_in_s))).done

    async def tokens(self, conversation: str) -> tuple[tuple[int, ...], str]:
        """Return the tokens of an idle conversation and their salt; no tokens if it cannot be moved."""
        reply = await self._ask(EngineCommand("tokens", conversation))
        return reply.tokens, reply.salt

    async def drain(self, draining: bool = True) -> None:
        await self._ask(EngineCommand("drain", draining=draining))

    async def drop(self, epoch: int, members: tuple[str, ...], part: int) -> None:
        """Make the engine keep only the layers of part number `part`, and drop all others.

        Each of the `members` needs this command with a part of its own. States report progress (`split`).
        """
        await self._ask(EngineCommand("drop", epoch=epoch, members=members, part=part))

    async def restore(self, epoch: int) -> None:
        """Make the engine load all its layers again and compute alone."""
        await self._ask(EngineCommand("restore", epoch=epoch))

    async def check(self) -> tuple[str, ...]:
        """Run the engine's integrity check and return its faults. A busy engine checks nothing."""
        return (await self._ask(EngineCommand("check"))).faults

    async def _ask(self, command: EngineCommand) -> Reply:
        async with self._connected(command) as engine:
            reply = _decode_reply(await asyncio.wait_for(engine.readline(), REPLY_S))
        if reply.error:
            raise ControlSocketError(reply.error)
        return reply

    @asynccontextmanager
    async def _connected(self, command: EngineCommand) -> AsyncIterator[asyncio.StreamReader]:
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_LINE)
            try:
                writer.write(_line(command))
                yield reader
            finally:
                writer.close()
        except (OSError, ValueError) as error:  # also time-outs and unreadable messages
            raise ControlSocketError(f"{self._path} does not answer {command.command}: {error!r}") from error


def _line(message: EngineCommand | Reply | EngineState) -> bytes:
    return msgspec.json.encode(message) + b"\n"
