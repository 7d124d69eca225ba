"""Headless Chromium renders the dashboard at the sizes of a desktop and a phone."""

import asyncio
import shutil
import struct
from pathlib import Path
from urllib.parse import quote

import pytest

from router.gateway.config import SloSettings
from tests.support.fake_fleet import ask, fleet, get, user

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: deploy/setup/packages.sh"),
]
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--hide-scrollbars",
)


async def chromium(profile: Path, url: str, *options: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", "--virtual-time-budget=4000", *options, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(90):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


async def test_the_dashboard_draws_engines_and_timelines(tmp_path: Path) -> None:
    async with fleet(tmp_path / "fleet", slos={"default": SloSettings(ttfet_s=30.0)}) as made:
        url = made.urls[0]
        for agent in range(3):
            messages = [user(f"agent {agent} " * 40)]
            await ask(url, messages, headers={"x-conversation-id": f"agent-{agent}"}, stream=True)
        await made.settle()
        document = (await chromium(tmp_path / "profile", f"{url}/dashboard", "--dump-dom")).decode()
        (timeline, *_) = (await get(f"{url}/dashboard/state"))[1]["timelines"]
        named = f"{url}/dashboard#{quote(timeline['key'])}"
        receipt = (await chromium(tmp_path / "profile", named, "--dump-dom")).decode()
        for size, name in (("1280,900", "desk.png"), ("390,844", "phone.png")):
            await chromium(
                tmp_path / "profile",
                f"{url}/dashboard",
                f"--screenshot={tmp_path / name}",
                f"--window-size={size}",
            )
    for engine in ("p0", "d0", "d1"):
        assert f"<strong>{engine}</strong>" in document
    assert document.count('class="timeline"') == 3 and "agent-2" in document
    assert document.count("<rect") >= 3
    assert "100 %" in document and "of 3 answers begin within 30 s" in document
    assert "<dialog" in receipt and "least KV in use" in receipt and "1 transfer" in receipt
    assert '<b id="live">3</b>' in document
    assert '<span id="notice" role="status"></span>' in document
    assert size_of(tmp_path / "desk.png") == (1280, 900)
    assert size_of(tmp_path / "phone.png")[1] == 844


async def test_the_dashboard_of_an_empty_fleet_explains_how_to_begin(tmp_path: Path) -> None:
    async with fleet(tmp_path / "fleet") as made:
        url = made.urls[0]
        document = (await chromium(tmp_path / "profile", f"{url}/dashboard", "--dump-dom")).decode()
    assert f"curl {url}/v1/chat/completions" in document and '"model":"small"' in document
