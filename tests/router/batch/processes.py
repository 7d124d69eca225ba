"""Runs fake engines and batch services in processes of their own, which a test can kill at any moment."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

_START_S = 30.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """Process that runs a module of the tests on a fixed port, and prints its address once it listens."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", module, "--port", str(self.port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, *within: str) -> None:
        """Start the process; `within` is a command that executes its arguments, such as `nsenter`."""
        command = [*within, *self._command]
        self._process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            first = await asyncio.to_thread(self._process.stdout.readline)
        assert first, "it ended before it listened"

    async def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait, 10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        self.kills += 1

    async def ended(self, within_s: float) -> None:
        """Wait until the process has ended by itself."""
        assert self._process is not None and self._process.stdout is not None
        await asyncio.to_thread(self._process.wait, within_s)
        self._process.stdout.close()
        self._process = None

    async def stop(self) -> None:
        if self._process is not None:
            await self.kill()


def engine_process(log: Path, delay_s: float) -> Process:
    return Process("tests.router.batch.fake_engine", "--log", str(log), "--delay", str(delay_s))


def batch_process(store_url: str, files: Path, window: int, *engines: str) -> Process:
    return Process(
        "tests.router.batch.gateway",
        *("--store", store_url, "--files", str(files), "--blind-window", str(window)),
        *engines,
    )
