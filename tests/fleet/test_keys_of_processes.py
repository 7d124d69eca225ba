"""Engines, process services and Ray of a real fleet refuse strangers, and no key leaks."""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from deploy.home import FleetKeys, Purpose
from deploy.lifecycle.down import marked
from deploy.ray.cluster import temporary_directory
from deploy.ray.control import INFO
from router.directory.api import messages
from router.directory.api.rpc import Method, Stub
from tests.fleet.talk import client, opening, text_turn
from tests.support.fleet import ROOT, RunningFleet
from workers.engine.engine_key import KEY_HEADER

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1500)]

HEADER = KEY_HEADER.decode()


@pytest.fixture(scope="module")
def token(laptop_fleet: RunningFleet) -> str:
    return laptop_fleet.home.ray_token().read_text().strip()


@pytest.fixture(scope="module")
def keys(laptop_fleet: RunningFleet, token: str) -> FleetKeys:
    return FleetKeys(token, laptop_fleet.fleet.name)


def test_engines_refuse_requests_without_the_engines_key(laptop_fleet: RunningFleet, keys: FleetKeys) -> None:
    ask = {"model": laptop_fleet.model, "prompt": "hello", "max_tokens": 2}
    for engine in laptop_fleet.engines().values():
        url = f"http://{engine['http']}"
        for path in ("/health", "/v1/models", "/version", "/openapi.json"):
            assert httpx.get(url + path).status_code == 401, path
        for path in ("/v1/completions", "/tokenize", "/abort_requests", "/invocations"):
            assert httpx.post(url + path, json=ask).status_code == 401, path
        wrong = {HEADER: keys.of(Purpose.BATCH)}
        assert httpx.post(f"{url}/v1/completions", json=ask, headers=wrong).status_code == 401
        assert "vllm:" in httpx.get(f"{url}/metrics").text
        right = {HEADER: keys.of(Purpose.ENGINES)}
        answered = httpx.post(f"{url}/v1/completions", json=ask, headers=right, timeout=60)
        assert answered.status_code == 200 and answered.json()["choices"]


def test_the_key_of_one_service_is_refused_by_all_others(laptop_fleet: RunningFleet, keys: FleetKeys) -> None:
    async def ask(address: str, method: Method, key: str) -> bool:  # type: ignore[type-arg]
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                await Stub(channel, key).ask(method, None, 10)
            except grpc.aio.AioRpcError as refused:
                assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
                return False
            return True

    run = laptop_fleet.home.read_run()
    assert run is not None
    keeper = (laptop_fleet.home.engine("decode-0") / "control").read_text()
    let_in = {
        (name, purpose)
        for name, address, method in (("directory", run.directory, messages.STATUS), ("keeper", keeper, INFO))
        for purpose in Purpose
        if asyncio.run(ask(address, method, keys.of(purpose)))
    }
    assert let_in == {("directory", Purpose.DIRECTORY), ("keeper", Purpose.KEEPERS)}
    (batch,) = laptop_fleet.status()["batch"]
    for purpose in Purpose:
        headers = {"authorization": f"Bearer {keys.of(purpose)}", "x-conserve-caller": "somebody"}
        status = httpx.get(f"http://{batch}/v1/batches", headers=headers).status_code
        assert status == (200 if purpose is Purpose.BATCH else 401), purpose


def test_no_command_line_and_no_log_contains_a_key(
    laptop_fleet: RunningFleet, keys: FleetKeys, token: str
) -> None:
    text_turn(client(laptop_fleet.url, "keys"), laptop_fleet.model, opening(77, 8))
    secrets = [token, *(keys.of(purpose) for purpose in Purpose)]
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if any(secret in line for secret in secrets)]
    assert not any(secret in laptop_fleet.said for secret in secrets)
    seen = 0
    for file in files(laptop_fleet):
        mode, content = file.stat().st_mode, file.read_bytes()
        seen += 1
        if any(secret.encode() in content for secret in secrets):
            assert file.name in ("token", "config.json"), file
            assert stat.S_IMODE(mode) == 0o600, file
        if "gcs" in file.parts:  # what Ray keeps of actors' arguments
            assert b'"tiers"' not in content and b"max-num-seqs" not in content, file
    assert seen > 20
    assert stat.S_IMODE(laptop_fleet.home.root.stat().st_mode) == 0o700


def files(fleet: RunningFleet) -> Iterator[Path]:
    for folder in (fleet.home.root, temporary_directory(fleet.home)):
        for path in folder.rglob("*"):
            if path.is_file() and path.stat().st_size < 64 << 20:
                yield path


def test_only_engines_have_keys_in_their_environment_and_only_those_they_need(
    laptop_fleet: RunningFleet, keys: FleetKeys, token: str
) -> None:
    of_engines = {keys.of(Purpose.ENGINES), keys.of(Purpose.TRANSFER)}
    hidden = {token, *(keys.of(purpose) for purpose in Purpose)}
    holding = set()
    for process in marked(laptop_fleet.home):
        file = Path(f"/proc/{process.pid}/environ")
        assert stat.S_IMODE(file.stat().st_mode) == 0o400 and file.stat().st_uid == os.getuid()
        found = {secret for secret in hidden if secret.encode() in file.read_bytes()}
        if found:
            assert found == of_engines, (process.cmdline(), found)
            holding.add(process.pid)
    assert holding and holding <= {
        child.pid for engine in laptop_fleet.engines().values() for child in tree(engine["pid"])
    }


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def test_ray_refuses_a_client_without_the_token(laptop_fleet: RunningFleet) -> None:
    run = laptop_fleet.home.read_run()
    assert run is not None
    joining = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, run.ray_address],
            env={**os.environ, "RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": given},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for mode, given in (("disabled", ""), ("token", "0123456789abcdef0123456789abcdef"))
    ]
    for joined in joining:  # at the same time, because Ray tries for twenty seconds
        said, _ = joined.communicate(timeout=120)
        assert "JOINED" not in said and joined.returncode != 0, said


JOIN = """
import sys, ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.2", logging_level="ERROR")
print("JOINED", ray.get(ray.remote(num_cpus=0)(lambda: 1).remote(), timeout=30))
"""
