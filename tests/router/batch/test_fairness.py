"""Ten owners with batches of very different sizes get equal shares of the engines."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import FAST, GatewayWithBatch, StaticFleet
from tests.router.batch.jobs import ended, in_progress, jsonl, line, submit

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 768, 1_024)


@pytest.mark.slow
async def test_owners_with_batches_of_very_different_sizes_get_equal_shares(
    sqlite_url: str, tmp_path: Path
) -> None:
    engine = OfflineEngine(delay_s=0.01)
    fleet = StaticFleet(await engine.start())
    gateway = GatewayWithBatch(sqlite_url, str(tmp_path / "files"), fleet, replace(FAST, blind_window=10))
    fleet_of_engines, fleet.infos = fleet.infos, []  # no request starts before all batches are submitted
    await gateway.start()
    clients = [gateway.client(f"sk-{key}") for key in range(10)]
    batches = []
    for key in reversed(range(10)):  # in order of arrival the small batches, which are last, would starve
        lines = [line(f"r{i}", f"key{key} {i}") for i in range(SIZES[key])]
        batches.append(await submit(clients[key], jsonl(lines)))
    for client, batch in zip(reversed(clients), batches, strict=True):
        await in_progress(client, batch)
    fleet.infos = fleet_of_engines
    for key in range(9):
        await ended(clients[key], batches[9 - key], within_s=60)
        if key == 5:  # the six small batches have ended; the four large ones still run
            break
    shares = Counter(prompt.split()[0] for prompt in engine.served)
    for client in clients:
        await client.close()
    await gateway.stop()
    await engine.stop()
    large = [shares[f"key{key}"] for key in range(6, 10)]
    index = jain_index(large)
    finished = [shares[f"key{key}"] for key in range(6)]
    print(f"served when the 128 were through: {dict(sorted(shares.items()))}")
    print(f"Jain index of the keys still at work: {index:.4f}")
    assert finished == list(SIZES[:6])
    assert index > 0.98
    assert max(large) <= 2 * SIZES[5]  # no owner got much more than the owner whose batch has ended


def jain_index(shares: Collection[float]) -> float:
    """Return Jain's fairness index: 1 if all shares are equal, 1/n if one of n owners has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
