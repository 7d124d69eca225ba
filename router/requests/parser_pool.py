"""Pool of processes that parse large bodies outside the event loop: `python -m router.requests.parser_pool`.

Parsing holds the interpreter's lock, so that a thread would stall the loop. A process that takes too much
time or memory is killed, and only its own request fails. `ProcessPoolExecutor` would fail all requests when
it loses a process. A body goes to the process in the pieces in which it was received.
"""

import asyncio
import contextlib
import logging
import pickle
import resource
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol, TypeVar
from weakref import WeakValueDictionary

from router.errors import ApiError, InternalError, PayloadTooLarge, TooManyRequests, Unavailable
from router.requests.body_parser import is_cheap

log = logging.getLogger("conserve.router.parser_pool")

PROCESSES = 2
MAX_PARSE_S = 30.0
MAX_WAIT_S = 60.0  # longest wait for a free process
MAX_WAITING = 8  # most costly bodies of one owner that are parsed or wait
MAX_WAITING_BYTES = 1 << 30  # of all owners' bodies, which are in memory while they wait
MAX_PROCESS_MEMORY = 4 << 30  # 32 MiB of numbers take 1 GiB as Python objects
Parsed = TypeVar("Parsed")
Parsed_co = TypeVar("Parsed_co", covariant=True)
_FRAME = struct.Struct("!QQ")  # bytes of the pickled parser or result, bytes of the body after it


class Parser(Protocol[Parsed_co]):
    """Parser of a body. The parser can be pickled, so that another process can run it."""

    @property
    def space(self) -> str:
        """Return the owner of the body that is parsed."""

    def parse(self, pieces: Sequence[bytes]) -> Parsed_co: ...


class ParserPool:
    """Parses small bodies in this process and costly ones in others, one at a time for each owner.

    Processes start with the first costly body and end with `close`, or with this process.
    """

    def __init__(
        self,
        processes: int = PROCESSES,
        max_parse_s: float = MAX_PARSE_S,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Process] = []
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._max_parse_s, self._max_wait_s = max_parse_s, max_wait_s
        self._waiting: Counter[str] = Counter()  # by owner; a body that is being parsed counts too
        self._waiting_bytes = 0

    async def parse(self, parser: Parser[Parsed], pieces: Sequence[bytes]) -> Parsed:
        """Parse a body, here or in another process. Raises ApiError, which the client gets."""
        if is_cheap(pieces):
            return parser.parse(pieces)
        return await self.parse_in_process(parser, pieces)

    async def parse_in_process(self, parser: Parser[Parsed], pieces: Sequence[bytes]) -> Parsed:
        """Parse a body in another process, or refuse it if too many bodies wait."""
        owner, size = parser.space, sum(map(len, pieces))
        if size > MAX_WAITING_BYTES:
            raise PayloadTooLarge(f"the body has {size} bytes; {MAX_WAITING_BYTES} can be read; send less")
        if self._waiting[owner] >= MAX_WAITING or self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise _too_many()
        self._waiting[owner] += 1
        self._waiting_bytes += size
        try:
            return await self.parse_queued(parser, pieces)
        finally:
            self._waiting_bytes -= size
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]

    async def parse_queued(self, parser: Parser[Parsed], pieces: Sequence[bytes]) -> Parsed:
        """Parse a body in another process, however many bodies wait.

        This is for a body that cannot be sent again, such as an engine's answer. The caller limits its size.
        """
        async with contextlib.AsyncExitStack() as turn:
            await self._wait_for_process(parser.space, turn)
            parsed = await self._run(parser, pieces)
        if isinstance(parsed, ApiError):
            raise parsed
        return parsed

    async def _wait_for_process(self, owner: str, turn: contextlib.AsyncExitStack) -> None:
        """Wait until a process is free and no other body of this owner is being parsed."""
        lock = self._owners.get(owner) or self._owners.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(self._max_wait_s):
                await turn.enter_async_context(lock)
                await turn.enter_async_context(self._free)
        except TimeoutError:
            log.warning("body not parsed: no process was free in time limit_s=%g", self._max_wait_s)
            raise _too_many() from None

    async def _run(self, parser: Parser[Parsed], pieces: Sequence[bytes]) -> Parsed | ApiError:
        process = self._idle_process() or await _start()
        try:
            async with asyncio.timeout(self._max_parse_s):
                parsed = await _exchange(process, parser, pieces)
        except (TimeoutError, OSError, EOFError) as error:
            _kill(process)
            log.warning("body not parsed bytes=%d reason=%r", sum(map(len, pieces)), error)
            raise PayloadTooLarge("the body takes too much time or memory to read; send less") from None
        except BaseException:
            _kill(process)
            raise
        self._idle.append(process)
        return parsed

    def _idle_process(self) -> Process | None:
        """Return an idle process that is alive; the system may have killed some for lack of memory."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    def close(self) -> None:
        while self._idle:
            _kill(self._idle.pop())


async def _start() -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.requests.parser_pool", stdin=PIPE, stdout=PIPE, limit=4 << 20
        )
    except OSError as error:  # no descriptors, processes or memory
        log.error("no parser process can be started reason=%r", error)
        raise Unavailable("large requests cannot be read now; try again", retry_after_s=1.0) from error


def _too_many() -> TooManyRequests:
    text = "too many large requests wait to be read; send this one again"
    return TooManyRequests(text, code="too_many_at_once", retry_after_s=1.0)


async def _exchange(process: Process, parser: Parser[Parsed], pieces: Sequence[bytes]) -> Parsed | ApiError:
    """Send a parser and a body to a process, and return what the process answers."""
    assert process.stdin is not None and process.stdout is not None
    pickled = pickle.dumps(parser)
    process.stdin.write(_FRAME.pack(len(pickled), sum(map(len, pieces))) + pickled)
    for piece in pieces:
        process.stdin.write(piece)
        await process.stdin.drain()
    size, _ = _FRAME.unpack(await process.stdout.readexactly(_FRAME.size))
    parsed: Parsed | ApiError = pickle.loads(await process.stdout.readexactly(size))
    return parsed


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _serve(requests: BinaryIO, results: BinaryIO) -> None:
    """Parse bodies until the pool closes the pipe."""
    while len(head := requests.read(_FRAME.size)) == _FRAME.size:
        size, body_size = _FRAME.unpack(head)
        parser: Parser[Any] = pickle.loads(requests.read(size))
        result: Any
        try:
            result = parser.parse((requests.read(body_size),))
        except ApiError as error:
            result = error
        except MemoryError:
            raise  # ends this process, and frees what it holds
        except Exception as error:  # noqa: BLE001  a fault of ours fails this request only
            print(f"parsing a body failed: {error!r}", file=sys.stderr, flush=True)
            result = InternalError("the body could not be read")
        data = pickle.dumps(result)
        results.write(_FRAME.pack(len(data), 0) + data)
        results.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MAX_PROCESS_MEMORY, MAX_PROCESS_MEMORY))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
