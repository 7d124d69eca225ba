"""Commands accept only the fleet's certificate, under any host name; curl is told a name that it has."""

import asyncio
import shlex
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.cli.commands.top import look
from deploy.cli.commands.up import curl_line
from deploy.errors import DeployError
from deploy.fleet import FleetSpec
from deploy.lifecycle.endpoint import certificate_of, endpoint_of, trust_of
from router.gateway.config import TlsConfig
from tests.support.certificates import Authority
from tests.support.fake_fleet import MODEL, FakeFleet, fleet

NAMES = [("localhost", "127.0.0.1"), ("llm.example",)]


def spec(cert: Path, key: Path, port: int) -> FleetSpec:
    tiers = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
    gateway = {"tls": {"cert": str(cert), "key": str(key)}, "port": port}
    return FleetSpec.of({"tiers": tiers, "gateway": gateway, "model": {"path": "a/b", "served_name": MODEL}})


@pytest.fixture(params=NAMES, ids=["named", "named otherwise"])
async def sealed(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[FakeFleet, FleetSpec]]:
    cert, key = Authority(tmp_path).pair(names=request.param)
    tls = TlsConfig(str(cert), str(key))
    async with fleet(tmp_path / "fleet", tls=tls) as made:
        yield made, spec(cert, key, int(made.urls[0].rpartition(":")[2]))


async def test_conserve_top_and_the_readiness_check_reach_a_tls_gateway(
    sealed: tuple[FakeFleet, FleetSpec],
) -> None:
    made, up = sealed
    trust, url = trust_of(up), endpoint_of(up)
    assert url == made.urls[0].replace("http://", "https://") and trust is not None
    state = await asyncio.to_thread(look, url, "", trust)
    assert {engine["engine"] for engine in state["engines"]} == {"p0", "d0", "d1"}

    def ready() -> int:
        with urllib.request.urlopen(f"{url}/ready", timeout=5, context=trust) as answered:
            return int(answered.status)

    assert await asyncio.to_thread(ready) == 200
    with pytest.raises(DeployError, match="CERTIFICATE_VERIFY_FAILED"):
        await asyncio.to_thread(look, url, "", None)


async def test_the_curl_line_that_up_prints_works(sealed: tuple[FakeFleet, FleetSpec]) -> None:
    _, up = sealed
    command = [*shlex.split(curl_line(up)), "-s", "--max-time", "20"]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0 and '"finish_reason"' in run.stdout, (command, run.stdout, run.stderr)


async def test_commands_trust_no_certificate_but_the_fleets(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    mine, other = authority.pair("mine"), authority.pair("other")  # of one issuer, and one name
    async with fleet(tmp_path / "fleet", tls=TlsConfig(*map(str, other))) as made:
        up = spec(*mine, int(made.urls[0].rpartition(":")[2]))
        with pytest.raises(urllib.error.URLError) as refused:
            await asyncio.to_thread(
                urllib.request.urlopen, f"{endpoint_of(up)}/ready", None, 5, context=trust_of(up)
            )
    assert isinstance(refused.value.reason, ssl.SSLCertVerificationError)


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("fd00::1", "[fd00::1]"), ("h", "h")]
)
def test_the_endpoint_has_a_loopback_address_of_the_gateways_address_family(host: str, reached: str) -> None:
    tiers = [{"name": "all", "role": "mixed"}]
    up = FleetSpec.of({"policy": "collocated", "tiers": tiers, "gateway": {"host": host}})
    assert endpoint_of(up) == f"http://{reached}:8000"


def test_the_certificate_file_is_named_only_if_it_is_on_this_machine(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).pair()
    assert certificate_of(spec(cert, key, 8000)) == str(cert)
    assert certificate_of(spec(tmp_path / "elsewhere.pem", key, 8000)) == ""


def test_without_tls_the_endpoint_is_plain_http(tmp_path: Path) -> None:
    plain = spec(tmp_path / "a.pem", tmp_path / "a.key", 8000).model_copy(
        update={"gateway": FleetSpec.model_fields["gateway"].get_default()}
    )
    assert trust_of(plain) is None and endpoint_of(plain) == "http://127.0.0.1:8000"
    assert curl_line(plain).startswith("curl http://127.0.0.1:8000/v1/chat/completions ")
