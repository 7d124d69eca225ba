"""Run a keeper in a process that a test can kill: python -m tests.support.keeper_process DIRECTORY MODEL
[OPTIONS]"""

import asyncio
import json
import logging
import sys
from pathlib import Path

from deploy.ray.control import ControlServer
from kvtransfer.config import ConnectorConfig
from placement.engines import Role
from workers.keeper.config import KeeperSettings
from workers.keeper.engine_status import EngineLink, StatusStore
from workers.keeper.idle_moves import KvSender
from workers.keeper.keeper import Keeper
from workers.keeper.launch import FEED_SOCKET, Device, EngineKeys, LaunchSpec

SECRET = "the-secret-of-this-test"
KEYS = EngineKeys("the-key-of-its-engine", "the-key-of-transfers")
LEASE_S = 20.0


def spec(directory: Path, model: str, options: dict[str, object]) -> LaunchSpec:
    return LaunchSpec(
        engine="engine-0",
        tier="mixed",
        role=Role.MIXED,
        model=model,
        served_name="small",
        device=Device.CPU,
        directory=directory,
        dtype="float32",
        max_context=4096,
        threads=1,
        options=tuple({"num-gpu-blocks-override": 256, "block-size": 32, **options}.items()),
        env=(("VLLM_CPU_KVCACHE_SPACE", "1"),),
        connector=ConnectorConfig(transfer=False),
    )


async def keep(directory: Path, model: str, options: dict[str, object]) -> None:
    board = StatusStore("engine-0")
    feed = EngineLink("engine-0", directory / FEED_SOCKET)
    control = ControlServer(board, feed, SECRET, KvSender(feed, board, "small", ""))
    address = await control.start("127.0.0.1")
    (directory / "control").write_text(address)
    memory_gib = options.pop("memory_gib", None)
    assert memory_gib is None or isinstance(memory_gib, float)
    settings = KeeperSettings(
        lease_s=LEASE_S, backoff_first_s=1.0, health_interval_s=0.5, memory_gib=memory_gib
    )
    wanted = spec(directory, model, options)
    await Keeper(wanted, settings, board, feed, keys=KEYS, control=address).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    asyncio.run(keep(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}))
