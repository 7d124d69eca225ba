"""Grammar checks in vLLM's front end: compile each grammar once, within a budget, one per owner at a time."""

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import time
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from workers.engine.grammars import metrics
from workers.engine.grammars.compile_process import COMPILE, CONFIGURE, LENGTH, restart_process
from workers.engine.grammars.config import LONG_FORK_NICE, GrammarBudget
from workers.processes import WorkerError, lower_priority

log = logging.getLogger("conserve.workers.grammars")

_KNOWN = 1024  # grammars whose outcome is remembered
_KNOWN_BYTES = 4096  # longest outcome that is remembered
_QUICK_S = 0.3  # after which a fork gets a low priority
_READY_S = 180.0  # longest wait for the process, which imports vLLM on a machine that may be busy

Outcome = dict[str, Any]


class ProcessUnavailable(WorkerError):
    """Error: the compiling process is gone or does not answer."""


class GrammarChecks:
    """Client of the compiling process for one event loop; it remembers the outcome of each grammar."""

    def __init__(self, address: str, budget: GrammarBudget) -> None:
        self._address, self._budget = address, budget
        self._configured = False
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(budget.at_once)
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._known: OrderedDict[bytes, Outcome] = OrderedDict()
        self._under_way: dict[tuple[str, bytes], asyncio.Task[Outcome]] = {}  # by owner and digest

    async def check(self, vllm_config: Any, constraint: Outcome, owner: str) -> Outcome:
        """Return the fields that vLLM's validation sets, or raise the error that the client gets."""
        content = json.dumps(constraint, sort_keys=True).encode()
        digest = sha256(content).digest()
        outcome = self._known.get(digest)
        if outcome is not None:
            self._known.move_to_end(digest)
            metrics.CHECKS.labels("known").inc()
        else:
            name = owner, digest
            task = self._under_way.get(name)
            if task is None:
                task = asyncio.create_task(self._compile(vllm_config, content, digest, owner))
                self._under_way[name] = task
                task.add_done_callback(lambda done: self._ended(name, done))
            outcome = await asyncio.shield(task)  # other requests of this owner may wait for the task
        return self._answer(outcome)

    def _ended(self, name: tuple[str, bytes], task: "asyncio.Task[Outcome]") -> None:
        del self._under_way[name]
        if not task.cancelled():
            task.exception()  # retrieved here, because all requests that waited for it may have left

    def _remember(self, digest: bytes, outcome: Outcome) -> None:
        if len(json.dumps(outcome)) <= _KNOWN_BYTES:
            self._known[digest] = outcome
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)

    def _answer(self, outcome: Outcome) -> Outcome:
        if "set" in outcome:
            return dict(outcome["set"])
        if "invalid" in outcome:
            raise VLLMValidationError(str(outcome["invalid"]))
        raise VLLMValidationError(
            f"compiling the grammar of this request takes more than {self._budget.sentence}: use fewer or "
            "smaller repetitions, alternatives and optional properties"
        )

    async def _compile(self, vllm_config: Any, content: bytes, digest: bytes, owner: str) -> Outcome:
        """Wait for the owner's turn and compile the grammar, unless another request did so meanwhile."""
        lock = self._owners.setdefault(owner, asyncio.Lock())
        try:
            async with asyncio.timeout(self._budget.wait_s) as waiting, lock, self._slots:
                waiting.reschedule(None)
                if (known := self._known.get(digest)) is not None:
                    metrics.CHECKS.labels("known").inc()
                    return known
                outcome = await self._compile_now(vllm_config, content)
                self._remember(digest, outcome)
                return outcome
        except TimeoutError:
            metrics.CHECKS.labels("unavailable").inc()
            raise _unavailable("other grammars are being compiled", 429) from None
        except ProcessUnavailable as wrong:
            metrics.CHECKS.labels("unavailable").inc()
            log.error("grammars cannot be compiled: %s", wrong)
            raise _unavailable(f"grammars cannot be compiled at this moment ({wrong})", 502) from wrong

    async def _compile_now(self, vllm_config: Any, content: bytes) -> Outcome:
        began = time.monotonic()
        try:
            outcome = await self._fork(vllm_config, content)
        finally:
            metrics.SECONDS.observe(time.monotonic() - began)
        kind = next(iter(outcome))
        metrics.CHECKS.labels({"set": "compiled", "invalid": "invalid"}.get(kind, "over_budget")).inc()
        if kind == "over_budget":
            took_s = time.monotonic() - began  # an error, because vLLM's server hides warnings
            log.error("a grammar was over its budget bytes=%d seconds=%.1f", len(content), took_s)
        return outcome

    async def _fork(self, vllm_config: Any, content: bytes) -> Outcome:
        """Return the outcome of a fork that compiles the grammar; kill the fork if it takes too long."""
        reader, writer = await self._connected(vllm_config)
        pid = 0
        try:
            writer.write(COMPILE + LENGTH.pack(len(content)) + content)
            try:
                async with asyncio.timeout(_READY_S):
                    pid = int(await _received(reader))
            except (OSError, EOFError, TimeoutError) as wrong:
                raise ProcessUnavailable("the compiling process does not fork") from wrong
            async with asyncio.timeout(self._budget.wall_s):
                outcome = json.loads(await _received_from_slow(reader, pid))
            return outcome if isinstance(outcome, dict) and outcome else {"over_budget": True}
        except (
            TimeoutError,
            EOFError,
            OSError,
            ValueError,
        ):  # the fork ended or is killed below
            return {"over_budget": True}
        finally:
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            writer.close()

    async def _connected(self, vllm_config: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the process; configure it if it is new, and restart it if it is gone."""
        async with self._starting:
            if self._configured:
                with suppress(OSError):
                    return await self._open()
            self._configured = False
            await self._configure(vllm_config)
            self._configured = True
        try:
            return await self._open()
        except OSError as wrong:
            raise ProcessUnavailable("the compiling process ended") from wrong

    async def _configure(self, vllm_config: Any) -> None:
        try:
            reader, writer = await self._open()
        except ConnectionRefusedError:
            log.error("the process that compiles grammars is gone and is started again")
            restart_process(self._address)
            reader, writer = await self._open_until(time.monotonic() + _READY_S)
        except OSError as wrong:
            raise ProcessUnavailable(f"the compiling process cannot be reached: {wrong}") from wrong
        try:
            content = pickle.dumps(vllm_config)
            writer.write(CONFIGURE + LENGTH.pack(len(content)) + content)
            async with asyncio.timeout(_READY_S):
                answer = json.loads(await _received(reader))
        except (OSError, EOFError, TimeoutError) as wrong:
            raise ProcessUnavailable("the compiling process does not take its configuration") from wrong
        finally:
            writer.close()
        if "error" in answer:
            raise ProcessUnavailable(f"the compiling process could not be set up: {answer['error']}")

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the compiling process without uvloop, which does not know abstract socket names."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(f"\0{self._address}")
            return await asyncio.open_unix_connection(sock=connection)
        except BaseException:
            connection.close()
            raise

    async def _open_until(self, limit: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await self._open()
            except OSError as wrong:
                if time.monotonic() > limit:
                    raise ProcessUnavailable("the compiling process does not start") from wrong
                await asyncio.sleep(0.2)


def _unavailable(why: str, status: int) -> GracefulHTTPError:
    """Return the error for a client. `status` must not be 503, which tells gateways that the engine ends."""
    return GracefulHTTPError(f"{why}; try again", HTTPStatus(status))


async def _received_from_slow(reader: asyncio.StreamReader, pid: int) -> bytes:
    """Receive the answer of a fork. A slow fork gets a low priority, so that it does not slow the engine."""
    receiving = asyncio.ensure_future(_received(reader))
    try:
        await asyncio.wait((receiving,), timeout=_QUICK_S)
        if not receiving.done():
            lower_priority(pid, LONG_FORK_NICE)
        return await receiving
    finally:
        receiving.cancel()


async def _received(reader: asyncio.StreamReader) -> bytes:
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as wrong:
        raise EOFError from wrong
