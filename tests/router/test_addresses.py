"""Only trusted proxies can name the address of a caller."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from router.auth.addresses import Addresses
from router.auth.keys import DefaultLimits
from router.gateway.config import GatewayLimits
from router.http import Headers, Request
from tests.support.fake_fleet import ask, fleet, user
from tests.support.waiting import until

PROXIES = ["10.0.0.0/8", "fd00::/8", "fe80::/10", "127.0.0.1"]


def request(peer: str, *forwarded: str, **others: str) -> Request:
    raw = [(b"X-Forwarded-For", one.encode()) for one in forwarded]
    raw += [(name.encode(), value.encode()) for name, value in others.items()]
    return Request("GET", "/", b"/", b"", Headers(raw), "1.1", True, None, (peer, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("peer", "forwarded", "caller"),
    [
        ("10.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("192.0.2.1", ["198.51.100.9"], "192.0.2.1"),  # not a trusted proxy
        ("10.0.0.1", ["1.1.1.1, 192.0.2.7"], "192.0.2.7"),  # the caller wrote the first address itself
        ("10.0.0.1", ["192.0.2.7, 10.2.3.4"], "192.0.2.7"),  # two proxies
        ("10.0.0.1", ["6.6.6.6", "192.0.2.7", "10.2.3.4"], "192.0.2.7"),  # the header occurs several times
        ("10.0.0.1", ["10.9.9.9"], "10.9.9.9"),  # called from the trusted network
        ("10.0.0.1", ["192.0.2.7:4711"], "192.0.2.7"),
        ("10.0.0.1", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("10.0.0.1", ["2001:db8::7"], "2001:db8::7"),
        ("::ffff:10.0.0.1", ["192.0.2.7"], "192.0.2.7"),
        ("fd00::1", ["192.0.2.7"], "192.0.2.7"),
        ("10.0.0.1", ["192.0.2.7, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["192.0.2.7, unknown, 10.2.3.4"], "10.2.3.4"),
        ("10.0.0.1", ["9" * 60_000], "10.0.0.1"),
        ("10.0.0.1", ["fe80::1%x key=admin"], "10.0.0.1"),  # a zone can be any text
        ("10.0.0.1", ["192.0.2.7, fe80::1%eth0"], "10.0.0.1"),
        ("10.0.0.1", ["[2001:db8::7]:" + "4" * 60], "10.0.0.1"),
        ("fe80::1%eth0", ["192.0.2.7"], "192.0.2.7"),  # the connection's address comes from the system
        ("10.0.0.1", ["192.0.2.7, " + ", ".join(["10.0.0.2"] * 31)], "192.0.2.7"),
        (
            "10.0.0.1",
            ["192.0.2.7, " + ", ".join(["10.0.0.2"] * 32)],
            "10.0.0.2",
        ),  # more hops than are read
        ("10.0.0.1", ["192.0.2.7".rjust(64)], "192.0.2.7"),
        ("10.0.0.1", ["192.0.2.7".rjust(65)], "10.0.0.1"),
    ],
)
def test_the_caller_is_the_last_address_that_is_not_a_trusted_proxy(
    peer: str, forwarded: list[str], caller: str
) -> None:
    assert Addresses(PROXIES).of(request(peer, *forwarded)) == caller
    assert Addresses([]).of(request(peer, *forwarded)) == peer


def test_no_header_except_x_forwarded_for_names_the_client_address() -> None:
    said = request("10.0.0.1", Forwarded="for=192.0.2.7", **{"X-Real-IP": "192.0.2.7"})
    assert Addresses(PROXIES).of(said) == "10.0.0.1"


async def test_limits_and_audit_log_use_the_address_that_a_trusted_proxy_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"key_limits": DefaultLimits(requests_per_minute=1), "audit": True}
    caplog.set_level(logging.INFO, "conserve.audit")
    async with fleet(tmp_path, trusted_proxies=("127.0.0.0/8",), **given) as made:
        statuses = [
            (await ask(made.urls[0], [user("hi")], headers={"x-forwarded-for": caller})).status
            for caller in ("192.0.2.1", "192.0.2.2", "9.9.9.9, 192.0.2.1")
        ]
    assert statuses == [200, 200, 429]
    assert [line.split("address=")[1].split()[0] for line in caplog.messages if "address=" in line] == [
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.1",
    ]


async def test_an_untrusted_sender_cannot_name_the_address_of_a_client(tmp_path: Path) -> None:
    limits = DefaultLimits(requests_per_minute=1)
    async with fleet(tmp_path, trusted_proxies=("10.0.0.0/8",), key_limits=limits) as made:
        statuses = [
            (await ask(made.urls[0], [user("hi")], headers={"x-forwarded-for": caller})).status
            for caller in ("192.0.2.1", "192.0.2.2")
        ]
    assert statuses == [200, 429]


async def test_requests_with_unknown_keys_share_the_connection_limit_of_their_address(tmp_path: Path) -> None:
    async with fleet(
        tmp_path, limits=GatewayLimits(connections=20, owner_share=0.2), trusted_proxies=("127.0.0.1",)
    ) as made:
        host, _, port = made.urls[0].removeprefix("http://").partition(":")
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n"
            "x-forwarded-for: 192.0.2.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        )
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        for number, (_, writer) in enumerate(slow):
            writer.write(head.format(f"invented-{number}").encode())
        await until(lambda: made.gateways[0].server.stats.requests == 4)
        statuses = [
            (await ask(made.urls[0], [user("hi")], headers={"x-forwarded-for": f"192.0.2.{caller}"})).status
            for caller in (1, 2)
        ]
        for _, writer in slow:
            writer.close()
    assert statuses == [429, 200]
