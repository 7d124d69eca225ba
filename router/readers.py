"""Processes that read costly bodies, so that the gateway's loop does not: `python -m router.readers`.

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
from collections.abc import Sequence
from typing import BinaryIO
from weakref import WeakValueDictionary

from router.errors import ApiError, PayloadTooLarge
from router.reading import ReadBody, Reading, is_cheap, read_body

log = logging.getLogger("conserve.router.readers")

PROCESSES = 2
LONGEST_S = 30.0  # for one body
MOST_MEMORY = 4 << 30  # of a process: a body of 32 MiB of numbers takes 1 GiB as objects
_FRAME = struct.Struct("!QQ")  # bytes of the question, and of the body behind it


class Readers:
    """Started when the first costly body comes; ended with `close`, or by the end of this process."""

    def __init__(self, processes: int = PROCESSES, longest_s: float = LONGEST_S) -> None:
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Process] = []
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._longest_s = longest_s

    async def read(self, asked: Reading, pieces: Sequence[bytes]) -> ReadBody:
        """Raises what the client did wrong."""
        if is_cheap(pieces):
            return read_body(asked, pieces)
        turn = self._owners.get(asked.space) or self._owners.setdefault(asked.space, asyncio.Lock())
        async with turn, self._free:
            process = self._idle.pop() if self._idle else await _start()
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
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def close(self) -> None:
        while self._idle:
            _end(self._idle.pop())


async def _start() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router.readers", stdin=PIPE, stdout=PIPE, limit=4 << 20
    )


async def _ask(process: Process, asked: Reading, pieces: Sequence[bytes]) -> ReadBody | ApiError:
    assert process.stdin is not None and process.stdout is not None
    question = pickle.dumps(asked)
    process.stdin.write(_FRAME.pack(len(question), sum(map(len, pieces))) + question)
    for piece in pieces:
        process.stdin.write(piece)
        await process.stdin.drain()
    size, _ = _FRAME.unpack(await process.stdout.readexactly(_FRAME.size))
    answer: ReadBody | ApiError = pickle.loads(await process.stdout.readexactly(size))
    return answer


def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    while len(head := questions.read(_FRAME.size)) == _FRAME.size:
        size, body = _FRAME.unpack(head)
        asked: Reading = pickle.loads(questions.read(size))
        answer: ReadBody | ApiError
        try:
            answer = read_body(asked, (questions.read(body),))
        except ApiError as wrong:
            answer = wrong
        data = pickle.dumps(answer)
        answers.write(_FRAME.pack(len(data), 0) + data)
        answers.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
