"""A gateway without keys refuses requests that pages of other sites send; with keys, the key decides."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from router.auth.keys import inline_keys
from router.gateway.config import BatchAddress
from tests.router.batch.gateway import SECRET, GatewayWithBatch
from tests.support.fake_fleet import ask, fleet, get, user

FORM = {"purpose": "batch"}
EVIL = {"origin": "https://evil.example"}
FOREIGN = (
    EVIL,
    {"origin": "null"},  # a file, or a frame without an origin
    {"origin": "http://127.0.0.1:1"},  # another server of this machine
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {**EVIL, "sec-fetch-site": "none"},
)


def upload() -> aiohttp.FormData:
    form = aiohttp.FormData(FORM)
    form.add_field("file", b'{"custom_id": "a"}\n', filename="a.jsonl")
    return form


async def post(url: str, headers: dict[str, str], data: object) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers, data=data) as response:
        return response.status, await response.text()


@pytest.fixture
async def url(sqlite_gateway: GatewayWithBatch, tmp_path: Path) -> AsyncIterator[str]:
    """Yield the URL of a gateway without keys, in front of a batch process."""
    async with fleet(tmp_path, batch=BatchAddress(sqlite_gateway.batch, SECRET)) as made:
        yield made.urls[0]


async def test_a_page_of_another_site_can_change_nothing_at_a_gateway_without_keys(url: str) -> None:
    for headers in FOREIGN:
        status, said = await post(f"{url}/v1/files", headers, upload())
        assert status == 403 and "cross_site" in said
        answer = await ask(url, [user("hi")], headers=headers)
        assert (answer.status, answer.error["code"]) == (403, "cross_site")
        assert (await get(f"{url}/v1/conversations/a", "DELETE", headers))[0] == 403
    assert (await get(f"{url}/v1/files", headers=EVIL))[1]["data"] == []


async def test_a_batch_is_created_only_if_the_content_type_is_json(url: str) -> None:
    wanted = '{"input_file_id": "file-0", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'
    for kind in ("text/plain", "multipart/form-data; boundary=a", "application/x-www-form-urlencoded"):
        status, said = await post(f"{url}/v1/batches", {"content-type": kind}, wanted)
        assert status == 400 and "must be application/json" in said
    _, said = await post(f"{url}/v1/batches", {"content-type": "application/json"}, wanted)
    assert "No such File object" in said


async def test_requests_of_clients_and_of_the_gateways_own_pages_are_served(url: str) -> None:
    for headers in ({}, {"origin": url}, {"origin": url, "sec-fetch-site": "same-origin"}):
        assert (await post(f"{url}/v1/files", headers, upload()))[0] == 200
        assert (await ask(url, [user("hi")], headers=headers)).status == 200
    assert (await get(f"{url}/v1/models", headers=EVIL))[0] == 200  # a link on another site


async def test_a_request_with_a_valid_key_is_served_whatever_site_sent_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys=inline_keys(("sk-one",), ())) as made:
        headers = {**EVIL, "authorization": "Bearer sk-one"}
        assert (await ask(made.urls[0], [user("hi")], headers=headers)).status == 200


async def test_a_gateway_with_only_admin_keys_refuses_pages_of_other_sites(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys=inline_keys((), ("sk-admin",))) as made:
        assert (await ask(made.urls[0], [user("hi")], headers=EVIL)).status == 403
