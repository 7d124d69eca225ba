"""The directory's process: serves gateways over gRPC, and follows the control services of all keepers.

It imports no Ray and needs none. Its actor starts it, keeps it running, and writes the keepers' addresses to
a file. While the actor is away, the process goes on with the addresses that it has.
"""

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path

from prometheus_client import start_http_server

from deploy.directory.config import HostedDirectoryConfig
from deploy.directory.engine_watch import EngineWatch
from deploy.ray.control import ControlClient, DirectorySuperseded
from placement.engines import EngineInfo
from placement.routing.placer import Placer
from router.directory.journal import JournalError
from router.directory.server import DirectoryServer
from router.process import collect_when_idle, log_to_stderr, settle_heap

log = logging.getLogger("conserve.deploy.directory")

LOOK_EVERY_S = 0.5
SEND_LIMIT_S = 60.0  # of one conversation's KV
# A replaced directory waits before it ends. If it ended immediately, its supervisor would restart it, and it
# would be the newest directory. After a partition, that old supervisor ends by itself within this time.
SUPERSEDED_S = 60.0


class KeepersFile:
    """File in which the actor writes each engine's keeper address, which is empty until it is known."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._addresses: dict[str, str] = {}

    def read(self) -> list[str]:
        """Read the file again and return its engines, or those of the last reading if it is unreadable."""
        try:
            self._addresses = json.loads(self._file.read_bytes())
        except (OSError, ValueError) as wrong:
            log.debug("keepers not read reason=%s", wrong)
        return list(self._addresses)

    def address_of(self, engine: str) -> str:
        return self._addresses.get(engine, "")


class HostedDirectory:
    """Runs the directory's server, and follows the keeper of each engine for it."""

    def __init__(self, config: HostedDirectoryConfig) -> None:
        self._config = config
        self._keepers = KeepersFile(Path(config.keepers))
        self._term = 0
        self._watches: dict[str, EngineWatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until the task is cancelled or a fault occurs."""
        config = self._config
        server = DirectoryServer(
            config.settings,
            Placer(config.placer, config.curves, config.alike),
            Path(config.journal),
            self._release,
            prefetch=self._prefetch,
            send=self._send,
            secret=config.secret,
            share=self._share,
        )
        await server.start(config.host, config.port)
        self._term = server.term
        log.info("serving address=%s:%d", config.host, config.port)
        settle_heap()
        page, _ = start_http_server(0, addr=config.host)
        server.metrics_page = f"{config.host}:{page.server_port}"
        # Garbage is collected once an hour, because no moment is idle. With 100,000 conversations that takes
        # half a second, in which nothing is placed.
        collecting = asyncio.create_task(collect_when_idle(lambda: False))
        try:
            await self._follow_keepers(server)
        finally:
            collecting.cancel()
            await server.stop()

    async def _follow_keepers(self, server: DirectoryServer) -> None:
        """Follow the keepers in the keepers' file, and engines that have outlived their keepers.

        Engines of the journal are followed immediately, at the keepers' addresses in the journal.
        """
        for record in server.table.fleet.records():
            self._watch(record.info.engine, server, record.info)
        while True:
            for task in self._tasks.values():
                if task.done():
                    task.result()  # raises: a watch only ends by a fault
            present = self._keepers.read()
            for engine in present:
                if engine not in self._watches:
                    self._watch(engine, server)
            for engine in self._watches.keys() - set(present):
                if not self._watches[engine].up:
                    self._tasks.pop(engine).cancel()
                    del self._watches[engine]
            await asyncio.sleep(LOOK_EVERY_S)

    def _watch(self, engine: str, server: DirectoryServer, known: EngineInfo | None = None) -> None:
        key, lease_s = self._config.keepers_key, self._config.lease_s
        watch = EngineWatch(engine, server, self._keepers.address_of, key, lease_s, known=known)
        self._watches[engine] = watch
        self._tasks[engine] = asyncio.create_task(watch.run())

    def _keeper_of(self, info: EngineInfo, timeout_s: float = 5.0) -> ControlClient:
        return ControlClient(info.control, self._config.keepers_key, timeout_s, term=self._term)

    async def _release(self, info: EngineInfo, conversation: str) -> None:
        async with self._keeper_of(info) as client:
            await client.release(conversation)

    async def _prefetch(self, info: EngineInfo, conversation: str, due_in_s: float) -> bool:
        async with self._keeper_of(info) as client:
            return await client.prefetch(conversation, due_in_s)

    async def _send(self, source: EngineInfo, target: EngineInfo, conversation: str) -> int | None:
        async with self._keeper_of(source, SEND_LIMIT_S) as client:
            sent = await client.send(conversation, target.http)
        return sent.recomputed_tokens if sent.done else None

    async def _share(self, info: EngineInfo, epoch: int, members: tuple[str, ...], part: int) -> None:
        async with self._keeper_of(info) as client:
            await (client.drop(epoch, members, part) if members else client.restore(epoch))


async def _until_asked_to_end(directory: HostedDirectory) -> None:
    running = asyncio.ensure_future(directory.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        log.info("ended on request")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.directory", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a JSON file of HostedDirectoryConfig")
    options = parser.parse_args(arguments)
    log_to_stderr()
    try:
        config = HostedDirectoryConfig.load(options.config.read_bytes())
        asyncio.run(_until_asked_to_end(HostedDirectory(config)))
    except JournalError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    except DirectorySuperseded as wrong:
        print(wrong, file=sys.stderr)
        time.sleep(SUPERSEDED_S)
        return 2
    return 0
