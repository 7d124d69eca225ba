"""A real gateway answers hundreds of malformed requests without a 500 and keeps no state of them."""

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fuzz.__main__ import FuzzResults, attackers
from tests.support.fake_fleet import MODEL, FakeFleet, ask, fleet, user

pytestmark = pytest.mark.slow

REQUESTS = 1500


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    async with fleet(tmp_path, decoders=2) as one:
        yield one


async def test_the_gateway_serves_requests_after_hundreds_of_malformed_ones(made: FakeFleet) -> None:
    before = await ask(made.urls[0], [user("an honest question")])
    seen, url = FuzzResults(), urlsplit(made.urls[0])
    await attackers((str(url.hostname), int(url.port or 0)), MODEL, REQUESTS, 7, seen)
    assert not seen.unanswered and not seen.internal, (seen.unanswered, seen.internal)
    assert seen.answers["400"] > REQUESTS / 10  # most are refused as malformed
    assert seen.answers["200"] > 0  # a mutated request that stays valid is served
    await made.settle()
    after = await ask(made.urls[0], [user("an honest question")])
    assert after.status == before.status == 200
