"""Gateway processes on one port: when one is killed or drained, others continue its conversations."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from router.gateway.config import GatewayConfig, ServedModel, dump
from tests.support.fake_fleet import MODEL, FakeFleet, ask, assistant, fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@asynccontextmanager
async def gateway_process(folder: Path, config: GatewayConfig) -> AsyncIterator[asyncio.subprocess.Process]:
    file = folder / f"{config.name}.json"
    file.write_bytes(dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.gateway.main", "--config", str(file)),
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stderr is not None
        while b"serving gateway=" not in (line := await asyncio.wait_for(process.stderr.readline(), 60.0)):
            assert line, "the gateway ended"
        draining = asyncio.create_task(process.stderr.read())
        yield process
        if process.returncode is None:
            process.kill()
        await draining
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("heir", ["one", "two"])
async def test_an_agent_that_retries_after_its_gateway_was_killed_continues_its_conversation(
    tmp_path: Path, heir: str
) -> None:
    """A new gateway process answers, long before the directory counts the killed one as gone."""
    async with fleet(tmp_path, gateways=0, gateway_grace_s=600.0, engine={"prefill_s": 0.05}) as made:
        port = free_port()
        url = f"http://127.0.0.1:{port}"

        def config(name: str) -> GatewayConfig:
            models = (ServedModel(MODEL),)
            return GatewayConfig(
                made.address, models, name=name, port=port, directory_secret="s3cret", tokens_per_byte=1.0
            )

        messages = [user("question " * 50)]
        async with gateway_process(tmp_path, config("one")) as one:
            first = await ask(url, messages)
            messages += [assistant("a"), user("b")]
            for engine in made.engines.values():
                engine.token_s = 1.0  # so that the kill comes during the answer
            await until(lambda: not running(made))
            cut_off = asyncio.create_task(ask(url, messages, stream=True, max_tokens=60))
            await until(lambda: running(made))
            one.kill()
            with pytest.raises(aiohttp.ClientError):
                await cut_off
        for engine in made.engines.values():
            engine.token_s = 0.001
        async with gateway_process(tmp_path, config(heir)):
            again = await ask(url, messages)
            assert (again.status, again.conversation) == (200, first.conversation)
            later = await ask(url, [*messages, assistant("c"), user("d")])
            assert later.conversation == first.conversation
            assert len(keys(made)) == 1
            assert len(made.prefills()) == 1


async def turns_on_pages(made: FakeFleet) -> float:
    """Return the number of complete turns, summed over the metrics pages of all gateway processes."""
    pages = made.directory.gateways.pages(of_batch=False)
    assert len(pages) == 2
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for page in pages:
            async with session.get(f"http://{page}/metrics") as answer:
                for line in (await answer.text()).splitlines():
                    if line.startswith('conserve_turns_total{outcome="complete"}'):
                        total += float(line.split()[-1])
    return total


def running(made: FakeFleet) -> bool:
    return any(map(made.directory.table.running_at, keys(made)))


def keys(made: FakeFleet) -> list[str]:
    return [conversation.key for conversation in made.directory.table.conversations]


async def test_of_two_gateway_processes_on_one_port_one_serves_on_when_the_other_is_killed(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, gateways=0, engine={"prefill_s": 0.1}) as made:
        port = free_port()
        url = f"http://127.0.0.1:{port}"

        def config(name: str) -> GatewayConfig:
            return GatewayConfig(
                made.address,
                (ServedModel(MODEL),),
                name=name,
                port=port,
                reuse_port=True,
                directory_secret="s3cret",
                tokens_per_byte=1.0,
                drain_s=5.0,
            )

        async with (
            gateway_process(tmp_path, config("one")) as one,
            gateway_process(tmp_path, config("two")) as two,
        ):
            await until(lambda: len(made.directory.gateways.pages(of_batch=False)) == 2)
            # Every request has a connection of its own, and the system spreads the connections.
            ids = set()
            for number in range(6):
                messages = [user(f"question {number}")]
                first = await ask(url, messages)
                await until(lambda: not running(made))
                second = await ask(url, [*messages, assistant("a"), user("b")])
                assert first.conversation == second.conversation
                ids.add(first.conversation)
            assert len(ids) == 6
            assert len(made.prefills()) == 6

            assert await turns_on_pages(made) == 12  # of both processes together

            before = len(made.directory.table.conversations)
            for engine in made.engines.values():
                engine.prefill_s = 3.0
            asking = [
                asyncio.create_task(ask(url, [user(f"cut off {number}" * 50)], stream=True))
                for number in range(8)
            ]
            await asyncio.sleep(0.7)
            one.kill()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            whole = [answer for answer in answers if not isinstance(answer, BaseException)]
            assert all(answer.status == 200 for answer in whole)
            assert all(isinstance(a, aiohttp.ClientError) for a in answers if a not in whole)
            await until(lambda: len(made.directory.table.conversations) == before + len(whole))
            await made.settle()
            held = sum(engine.held.total() for engine in made.engines.values())
            assert sum(made.directory.table.kv_in_use(name) for name in ("d0", "d1")) == held

            for engine in made.engines.values():
                engine.prefill_s = 0.5
            last = asyncio.create_task(ask(url, [user("while it leaves")], stream=True))
            await until(lambda: running(made))
            two.send_signal(signal.SIGTERM)
            answer = await last
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert await asyncio.wait_for(two.wait(), 60.0) == 0
            with pytest.raises(aiohttp.ClientError):
                await get(f"{url}/health")
