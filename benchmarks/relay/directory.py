"""Serves a directory that knows one fake engine, for the gateway under test.

python -m benchmarks.relay.directory PORT ENGINE_PORT FOLDER SECRET
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from placement.engines import EngineInfo, EngineState, Role
from placement.routing.placer import Placer
from placement.routing.placer_settings import PlacerSettings, PlacingPolicy
from router.directory.directory import DirectorySettings
from router.directory.server import DirectoryServer

ENGINE = "fake"
KV_TOKENS = 1_000_000_000
REPORT_S = 0.5


async def release(engine: EngineInfo, conversation: str) -> None:
    """Do nothing: the fake engine keeps no KV."""


async def serve(port: int, engine_port: int, folder: Path, secret: str) -> None:
    placer = Placer(PlacerSettings(policy=PlacingPolicy.COLLOCATED), {})
    settings = DirectorySettings(3600.0, settle_s=0.1)
    server = DirectoryServer(settings, placer, folder / "journal", release, secret=secret)
    await server.start("127.0.0.1", port)
    http = f"127.0.0.1:{engine_port}"
    server.engine_up(EngineInfo(ENGINE, "mixed", Role.MIXED, 1, http, "", "", KV_TOKENS, 16, 131_072))
    seq = 0
    while True:
        seq += 1
        server.engine_state(EngineState(ENGINE, 1, seq, 0, 0, 0, KV_TOKENS, 0, 0))
        await asyncio.sleep(REPORT_S)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]))
