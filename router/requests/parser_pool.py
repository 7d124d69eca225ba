"""Processes that parse costly bodies beside the event loop: `python -m router.requests.parser_pool`.

Parsing holds the interpreter, so that a thread would not do. A body goes over in the pieces in which it came,
and what is known of it comes back. One owner's bodies are read one after another, however many it sends.
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
from router.requests.parsing import is_cheap

log = logging.getLogger("conserve.router.readers")

PROCESSES = 2
LONGEST_S = 30.0  # for one body
LONGEST_WAIT_S = 60.0  # until it is read
MOST_WAITING = 8  # costly bodies of one owner, and MOST_WAITING_BYTES of all: they lie in memory meanwhile
MOST_WAITING_BYTES = 1 << 30
MOST_MEMORY = 4 << 30  # of a process: a body of 32 MiB of numbers takes 1 GiB as objects
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
_FRAME = struct.Struct("!QQ")  # bytes of the question, and of the body behind it


class Question(Protocol[Answer_co]):
    """What is asked of a body: plain data, and what makes plain data of it."""

    @property
    def space(self) -> str: ...

    def read(self, pieces: Sequence[bytes]) -> Answer_co: ...


class Readers:
    """Started when the first costly body comes; ended with `close`, or by the end of this process."""

    def __init__(
        self,
        processes: int = PROCESSES,
        longest_s: float = LONGEST_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Process] = []
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._longest_s, self._longest_wait_s = longest_s, longest_wait_s
        self._waiting: Counter[str] = Counter()  # by owner
        self._bytes = 0  # that wait, or are read

    async def read(self, asked: Question[Answer], pieces: Sequence[bytes]) -> Answer:
        """Raises what the client did wrong."""
        return asked.read(pieces) if is_cheap(pieces) else await self.read_beside(asked, pieces)

    async def read_beside(self, asked: Question[Answer], pieces: Sequence[bytes]) -> Answer:
        """In another process in any case. Refused where too much of its owner's, or of all, waits."""
        owner, size = asked.space, sum(map(len, pieces))
        if size > MOST_WAITING_BYTES:
            raise PayloadTooLarge(f"the body has {size} bytes; {MOST_WAITING_BYTES} can be read; send less")
        if self._waiting[owner] >= MOST_WAITING or self._bytes + size > MOST_WAITING_BYTES:
            raise _too_many()
        self._waiting[owner] += 1
        self._bytes += size
        try:
            return await self.read_in_turn(asked, pieces)
        finally:
            self._bytes -= size
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]

    async def read_in_turn(self, asked: Question[Answer], pieces: Sequence[bytes]) -> Answer:
        """Likewise, however much waits: for what cannot be sent again, and who asks bounds its bytes."""
        async with contextlib.AsyncExitStack() as place:
            await self._wait(asked.space, place)
            answer = await self._read(asked, pieces)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def _wait(self, owner: str, place: contextlib.AsyncExitStack) -> None:
        """Until it is this one's turn among its owner's, and a process is free."""
        turn = self._owners.get(owner) or self._owners.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(self._longest_wait_s):
                await place.enter_async_context(turn)
                await place.enter_async_context(self._free)
        except TimeoutError:
            log.warning("a body was not read: no process was free in time limit_s=%g", self._longest_wait_s)
            raise _too_many() from None

    async def _read(self, asked: Question[Answer], pieces: Sequence[bytes]) -> Answer | ApiError:
        process = self._living() or await _start()
        try:
            async with asyncio.timeout(self._longest_s):
                answer = await _ask(process, asked, pieces)
        except (TimeoutError, OSError, EOFError) as wrong:
            _end(process)
            log.warning("a body could not be read bytes=%d reason=%r", sum(map(len, pieces)), wrong)
            raise PayloadTooLarge("the body takes too much time or memory to read; send less") from None
        except BaseException:
            _end(process)
            raise
        self._idle.append(process)
        return answer

    def _living(self) -> Process | None:
        """One that has ended while it had nothing to do, say for want of memory, reads nothing any more."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    def close(self) -> None:
        while self._idle:
            _end(self._idle.pop())


async def _start() -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.requests.parser_pool", stdin=PIPE, stdout=PIPE, limit=4 << 20
        )
    except OSError as wrong:  # descriptors, processes or memory
        log.error("no process to read large bodies can be started reason=%r", wrong)
        raise Unavailable("large requests cannot be read now; try again", retry_after_s=1.0) from wrong


def _too_many() -> TooManyRequests:
    said = "too many large requests wait to be read; send this one again"
    return TooManyRequests(said, code="too_many_at_once", retry_after_s=1.0)


async def _ask(process: Process, asked: Question[Answer], pieces: Sequence[bytes]) -> Answer | ApiError:
    assert process.stdin is not None and process.stdout is not None
    question = pickle.dumps(asked)
    process.stdin.write(_FRAME.pack(len(question), sum(map(len, pieces))) + question)
    for piece in pieces:
        process.stdin.write(piece)
        await process.stdin.drain()
    size, _ = _FRAME.unpack(await process.stdout.readexactly(_FRAME.size))
    answer: Answer | ApiError = pickle.loads(await process.stdout.readexactly(size))
    return answer


def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    while len(head := questions.read(_FRAME.size)) == _FRAME.size:
        size, body = _FRAME.unpack(head)
        asked: Question[Any] = pickle.loads(questions.read(size))
        answer: Any
        try:
            answer = asked.read((questions.read(body),))
        except ApiError as wrong:
            answer = wrong
        except MemoryError:
            raise  # this process ends, and what it holds with it
        except Exception as fault:  # noqa: BLE001  a fault of ours costs this request, and no process
            print(f"reading a body failed: {fault!r}", file=sys.stderr, flush=True)
            answer = InternalError("the body could not be read")
        data = pickle.dumps(answer)
        answers.write(_FRAME.pack(len(data), 0) + data)
        answers.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
