"""Directory in a separate process that can be killed, with the reports of fake engines over HTTP."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import aiohttp

from placement.engines import EngineInfo, EngineState, Role
from router.directory.directory import DirectorySettings
from router.directory.server import DirectoryServer
from tests.support.engines import placer


class DirectoryProcess:
    def __init__(self, folder: Path, engines: list[EngineInfo]) -> None:
        self._folder = folder
        self._engines = json.dumps(
            [{name: getattr(info, name) for name in EngineInfo.__slots__} for info in engines]
        )
        self._process: asyncio.subprocess.Process | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, *within: str) -> None:
        """Start the process. `within`: a command that runs its arguments, such as `ip netns exec`."""
        command = [
            *within,
            sys.executable,
            "-m",
            "tests.support.directory_process",
            str(self._folder / "journal"),
        ]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            *("--port", str(self.port), "--engines", self._engines),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdout is not None
        self.port = int(await asyncio.wait_for(self._process.stdout.readline(), 60.0))

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _main(options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession() as session:

        async def release(info: EngineInfo, key: str) -> None:
            async with session.post(f"http://{info.http}/_release", json={"key": key}):
                pass

        server = DirectoryServer(
            DirectorySettings(3600.0, push_states_s=0.1, settle_s=2.0),
            placer(),
            options.journal,
            release,
            secret="s3cret",
        )
        port = await server.start("127.0.0.1", options.port)
        infos = [EngineInfo(**{**one, "role": Role(one["role"])}) for one in json.loads(options.engines)]
        for info in infos:
            server.engine_up(info)
        print(port, flush=True)
        while True:
            for info in infos:
                try:
                    async with session.get(f"http://{info.http}/_state") as response:
                        server.engine_state(EngineState(**await response.json()))
                except aiohttp.ClientError:
                    continue
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("journal", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engines", required=True)
    asyncio.run(_main(parser.parse_args()))
