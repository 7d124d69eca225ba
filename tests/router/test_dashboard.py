"""The dashboard's page and JSON show the fleet to callers who may see it."""

import base64
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from router.auth.keys import inline_keys
from router.gateway.config import SloSettings
from tests.support.fake_fleet import ask, fleet, user


async def fetch(url: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    async with aiohttp.ClientSession() as session, session.get(url + path, headers=headers) as answer:
        return answer.status, await answer.read(), dict(answer.headers)


async def state(url: str) -> dict[str, Any]:
    status, body, _ = await fetch(url, "/dashboard/state")
    assert status == 200
    return dict(orjson.loads(body))


async def test_the_dashboard_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        status, page, headers = await fetch(made.urls[0], "/dashboard")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert b"https://" not in page and b'src="' not in page and b"@import" not in page
    policy = headers["Content-Security-Policy"]
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    own = base64.b64encode(sha256(script).digest()).decode()
    assert "default-src 'self'" in policy
    assert f"script-src 'sha256-{own}'" in policy, "a script that markup brings along does not run"


async def test_the_dashboard_shows_engines_timelines_and_receipts(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        url = made.urls[0]
        first = await ask(url, [user("hello " * 50)], stream=True)
        await made.settle()
        shown = await state(url)
        assert {engine["engine"] for engine in shown["engines"]} == {"p0", "d0", "d1"}
        (timeline,) = shown["timelines"]
        assert timeline["key"].endswith(first.conversation)
        assert timeline["turns"] == timeline["transfers"] == 1
        assert [kind for kind, _ in timeline["spans"]] == ["prefill", "decode", "idle"]
        holder = next(engine for engine in shown["engines"] if engine["engine"] == timeline["engine"])
        assert holder["conversations"] == shown["live"] == 1
        status, body, _ = await fetch(url, f"/dashboard/conversations/{timeline['key']}")
        assert status == 200
        (placement,) = orjson.loads(body)["placements"]
        assert placement["receipt"]["decoder"]["chosen"]["engine"] == timeline["engine"]


async def test_the_dashboard_counts_slo_objectives_over_all_gateways(tmp_path: Path) -> None:
    async with fleet(
        tmp_path, gateways=2, slos={"default": SloSettings(ttfet_s=30.0, last_turn_tbt_s=1e-9)}
    ) as made:
        for number, url in enumerate((*made.urls, made.urls[0])):
            await ask(url, [user(f"{number} " * 50)], stream=True)
        await made.settle()
        shown = [(await state(url))["slo"] for url in made.urls]
    assert shown[0] == shown[1]
    by_name = {one["objective"]: (one["attained"], one["answers"], one["target_s"]) for one in shown[0]}
    assert by_name == {"ttfet": (1.0, 3, 30.0), "last_turn_tbt": (0.0, 3, 1e-9)}


async def test_the_dashboard_says_when_the_directory_is_unreachable(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        await made.directory.stop(0)
        shown = await state(made.urls[0])
        assert "directory" in shown["notice"] and shown["timelines"] == []


async def test_the_dashboard_asks_for_an_admin_key_where_keys_are_configured(tmp_path: Path) -> None:
    def basic(key: str) -> str:
        return "Basic " + base64.b64encode(f"me:{key}".encode()).decode()

    async with fleet(tmp_path, keys=inline_keys(("right",), ("boss",))) as made:
        url = made.urls[0]
        status, _, headers = await fetch(url, "/dashboard")
        assert status == 401 and headers["WWW-Authenticate"].startswith("Basic")
        for given in (basic("right"), "Bearer right", "Basic %%%"):
            assert (await fetch(url, "/dashboard/state", Authorization=given))[0] == 401
        for given in (basic("boss"), "Bearer boss"):
            assert (await fetch(url, "/dashboard/state", Authorization=given))[0] == 200
    async with fleet(tmp_path / "other", keys=inline_keys(("right",), ())) as made:
        assert (await fetch(made.urls[0], "/dashboard", Authorization="Bearer right"))[0] == 401
