"""When engines, the directory or clients die, the rest of the fleet goes on serving."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import REGISTRY

from placement.engines import EngineInfo, Role
from router.gateway.config import GatewayConfig, ServedModel
from router.gateway.main import Gateway
from tests.support.directory_process import DirectoryProcess
from tests.support.fake_engine import FakeEngine
from tests.support.fake_fleet import MODEL, ask, assistant, fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def engine_process(name: str, token_s: float) -> AsyncIterator[tuple[EngineInfo, int]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.fake_engine", "--name", name, "--token-s", str(token_s)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    port = int(await asyncio.wait_for(process.stdout.readline(), 60.0))
    try:
        yield replace(FakeEngine(name).info, http=f"127.0.0.1:{port}", transfer=""), process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_conversation_continues_after_its_decoder_was_killed_during_a_stream(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path, decoders=0) as made, engine_process("d0", 0.05) as (info, pid):
        made.directory.engine_up(info)
        started = asyncio.Event()

        async def stream() -> bytes:
            got = b""
            body = {"model": MODEL, "messages": [user("hi")], "stream": True, "max_tokens": 100}
            async with (
                aiohttp.ClientSession() as session,
                session.post(
                    f"{made.urls[0]}/v1/chat/completions", json=body, headers={"x-session-id": "s"}
                ) as response,
            ):
                async for piece in response.content.iter_any():
                    got += piece
                    started.set()
            return got

        streaming = asyncio.create_task(stream())
        await asyncio.wait_for(started.wait(), 60.0)
        os.kill(pid, signal.SIGKILL)
        got = await asyncio.wait_for(streaming, 60.0)
        last = got.strip().rsplit(b"\n\n", 1)[-1]
        assert last.startswith(b'data: {"error"')
        assert b"no_decoder" in last  # to continue the stream
        other = FakeEngine("d1")
        await other.start()
        made.engines["d1"] = other
        made.directory.engine_up(other.info)
        await made.settle()
        answer = await ask(
            made.urls[0], [user("hi"), assistant("w"), user("go on")], headers={"x-session-id": "s"}
        )
        assert answer.status == 200
        assert [bool(seen.params) for seen in other.seen] == [True]  # bound again as if new
        await made.settle()
        _, told = await get(f"{made.urls[0]}/v1/conversations/s")
        assert [note["cause"] for note in told["placements"]] == ["first_turn", "rebound"]
        # The lost engine gets no new request, although nobody has reported that it is down.
        assert (await ask(made.urls[0], [user("another")])).status == 200
        await other.stop()


async def test_a_turn_whose_engine_sends_an_error_event_counts_as_broken(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:

        async def outcomes() -> dict[str, float]:
            _, text = await get(f"{made.urls[0]}/metrics")
            lines = [line for line in text.splitlines() if line.startswith("conserve_turns_total{")]
            return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

        messages = [user("question " * 30)]
        first = await ask(made.urls[0], messages, stream=True)
        before = await outcomes()
        for engine in made.engines.values():
            engine.fail_after = 2
        messages += [assistant("a"), user("b")]
        broken = await ask(made.urls[0], messages, stream=True)
        assert broken.body.count(b"data: ") == 4  # two tokens, the error and the end, as the engine sent them
        assert b'"error": {"message": "Internal server error"' in broken.body
        for engine in made.engines.values():
            engine.fail_after = 0
        again = await ask(made.urls[0], messages, stream=True)
        assert again.conversation == broken.conversation == first.conversation
        after = await outcomes()
        assert after["broken"] - before.get("broken", 0) == 1
        assert after["complete"] - before["complete"] == 1


async def test_a_turn_is_retried_once_after_its_decoder_crashed_and_then_fails(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=2) as made:
        await ask(made.urls[0], [user("hi")], headers={"x-session-id": "s"})
        for engine in made.engines.values():
            if engine.name.startswith("d"):
                engine.fail_status, engine.fail_body = (
                    500,
                    '{"error": {"message": "EngineCore encountered an issue"}}',
                )
        answer = await ask(
            made.urls[0], [user("hi"), assistant("w"), user("x")], headers={"x-session-id": "s"}
        )
        assert (answer.status, answer.error["code"]) == (502, "request_set_aside")
        assert [len(made.engines[name].seen) for name in ("d0", "d1")] in ([2, 1], [1, 2])


@pytest.mark.parametrize("prefillers", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_crashes_engines_is_tried_only_twice(
    tmp_path: Path, prefillers: int, stream: bool
) -> None:
    async with fleet(tmp_path, decoders=5, prefillers=prefillers) as made:
        for engine in made.engines.values():
            engine.dies_of = b"poison"
        poison = [user("poison " * 50)]
        for attempt in range(3):  # clients' libraries retry whatever the answer says
            answer = await ask(made.urls[0], poison, headers={"x-session-id": f"{attempt}"}, stream=stream)
            assert (answer.status, answer.error["code"]) == (502, "request_set_aside")
            assert answer.headers["x-should-retry"] == "false"
        met = [name for name, engine in made.engines.items() if any(b"poison" in s.raw for s in engine.seen)]
        assert len(met) <= 2 + prefillers  # a try reaches one decoder and at most one prefiller
        await made.settle()
        assert not [one for one in made.directory.table.conversations if one.running]
        assert (await ask(made.urls[0], [user("something else")])).status == 200


async def test_the_conversations_of_a_restarted_engine_are_bound_anew(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1) as made:
        messages = [user("hi")]
        first = await ask(made.urls[0], messages)
        engine = made.engines["d0"]
        engine.epoch, engine.reports = 2, 0
        engine.held.clear()
        made.directory.engine_up(engine.info)
        await made.settle()
        second = await ask(made.urls[0], [*messages, assistant("a"), user("b")])
        assert second.conversation == first.conversation
        assert [bool(seen.params) for seen in engine.seen] == [True, True]


async def test_a_turn_is_answered_even_if_its_prefiller_fails_or_is_dead(tmp_path: Path) -> None:
    async with fleet(tmp_path) as made:
        made.engines["p0"].fail_status = 500
        assert (await ask(made.urls[0], [user("hi")])).status == 200
        dead = made.engines.pop("p0")
        await dead.stop()
        assert (await ask(made.urls[0], [user("ho")])).status == 200
        await made.settle()
        assert not made.directory.table.fleet.placeable("p0")
        assert (await ask(made.urls[0], [user("hu")])).status == 200
        assert [bool(seen.params) for seen in made.decoder_requests()].count(False) == 1


async def test_a_client_that_disconnects_leaves_no_leg_running_and_no_reservation(tmp_path: Path) -> None:
    async with fleet(tmp_path, engine={"prefill_s": 5.0}) as made:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(made.urls[0], [user("hi")], stream=True), 0.3)
        await until(lambda: not any(engine.running for engine in made.engines.values()))
        await until(lambda: not len(made.directory.table.conversations))
        await made.settle()
        assert [engine.running for engine in made.engines.values()] == [0, 0, 0]
        assert len(made.directory.table.conversations) == 0
        assert all(made.directory.table.kv_in_use(name) == 0 for name in ("d0", "d1"))


async def test_the_turn_of_a_client_that_disconnects_leaves_the_queue(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, place_wait_s=20.0) as made:
        made.engines["d0"].held["somebody"] = 99_000
        await made.settle()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ask(made.urls[0], [user("x" * 5000)]), 0.3)
        await until(lambda: made.directory.table.waiting == 0)
        made.engines["d0"].held.clear()
        await made.settle()
        assert len(made.directory.table.conversations) == 0


async def test_clients_that_disconnect_at_random_moments_leave_no_state_behind(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with fleet(tmp_path, engine={"prefill_s": 0.01, "token_s": 0.002}) as made:

        async def one(number: int) -> None:
            asking = ask(made.urls[0], [user(f"{number}")], headers={"x-session-id": f"s{number % 20}"})
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asking, rng.uniform(0.001, 0.08))

        for _ in range(5):
            await asyncio.gather(*(one(number) for number in range(40)))

        def nothing_is_left() -> bool:
            running = [c.key for c in made.directory.table.conversations if c.running]
            reserved = sum(made.directory.table.kv_in_use(name) for name in ("d0", "d1"))
            held = sum(engine.held.total() for engine in made.engines.values())
            busy = sum(engine.running for engine in made.engines.values())
            busy += int(REGISTRY.get_sample_value("conserve_relay_streams") or 0)
            return not running and not busy and reserved == held

        await until(nothing_is_left)
        assert made.gateways[0].pool.stats.connections < 100


async def test_without_free_kv_a_turn_waits_and_then_gets_a_429_with_a_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, place_wait_s=0.3) as made:
        patient = await made.add_gateway(directory_secret="s3cret", place_wait_s=600.0)
        made.engines["d0"].held["somebody"] = 94_000
        await made.settle()
        refused = await ask(made.urls[0], [user("x" * 5000)])
        assert (refused.status, refused.error["code"]) == (429, "no_capacity")
        assert int(refused.headers["retry-after"]) >= 1
        waiting = asyncio.create_task(ask(patient, [user("y" * 5000)]))
        await until(lambda: made.directory.table.waiting == 1)
        made.engines["d0"].held.clear()
        assert (await waiting).status == 200


class _Killable:
    """Fleet whose directory is a separate process that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.engines = {"p0": FakeEngine("p0", Role.PREFILL), "d0": FakeEngine("d0"), "d1": FakeEngine("d1")}
        self._folder = folder

    async def __aenter__(self) -> "_Killable":
        for engine in self.engines.values():
            engine.token_s = 0.001
            await engine.start()
        self.directory = DirectoryProcess(self._folder, [engine.info for engine in self.engines.values()])
        await self.directory.start()
        self.gateways: list[Gateway] = []
        self.urls: list[str] = []
        for _ in range(2):
            await self.add_gateway()
        return self

    async def add_gateway(self) -> Gateway:
        gateway = self._gateway(len(self.gateways))
        self.urls.append(f"http://127.0.0.1:{await gateway.start()}")
        self.gateways.append(gateway)
        await until(lambda: len(gateway.directory.engines))
        return gateway

    def decoder_of(self, name: str) -> str:
        return next(
            engine.name
            for engine in (self.engines["d0"], self.engines["d1"])
            if any(seen.conversation.endswith(f":{name}") for seen in engine.seen)
        )

    def _gateway(self, number: int) -> Gateway:
        config = GatewayConfig(
            self.directory.address,
            (ServedModel(MODEL),),
            name=f"g{number}",
            port=0,
            directory_secret="s3cret",
            place_wait_s=0.5,
            tokens_per_byte=1.0,
        )
        return Gateway(config)

    async def __aexit__(self, *_: object) -> None:
        for gateway in self.gateways:
            await gateway.stop(0.1)
        await self.directory.kill()
        for engine in self.engines.values():
            await engine.stop()


@pytest.mark.slow
async def test_bound_conversations_continue_while_the_directory_is_dead(
    tmp_path: Path,
) -> None:
    async with _Killable(tmp_path) as made:
        ids = {name: {"x-conversation-id": name} for name in ("a", "b", "c")}
        for name in ids:
            assert (await ask(made.urls[0], [user(name)], headers=ids[name])).status == 200
        before = {name: (await get(f"{made.urls[0]}/v1/conversations/{name}"))[1]["decoder"] for name in ids}
        await made.directory.kill()
        for name in ids:
            later = [user(name), assistant("x"), user("y")]
            assert (await ask(made.urls[0], later, headers=ids[name])).status == 200
        refused = await ask(made.urls[0], [user("new")], headers={"x-conversation-id": "new"})
        assert (refused.status, refused.error["code"]) == (503, "no_directory")
        assert "retry-after" in refused.headers
        await made.directory.start()
        assert (await ask(made.urls[0], [user("new")], headers={"x-conversation-id": "new"})).status == 200
        for name in ids:
            # The other gateway never served this conversation, so only the directory can know it.
            assert (await ask(made.urls[1], [user(name)], headers=ids[name])).status == 200
        after = {name: (await get(f"{made.urls[0]}/v1/conversations/{name}"))[1]["decoder"] for name in ids}
        assert after == before


async def test_without_a_directory_any_gateway_serves_a_bound_conversation(tmp_path: Path) -> None:
    async with _Killable(tmp_path) as made:
        name = {"x-conversation-id": "a"}
        assert (await ask(made.urls[0], [user("a")], headers=name)).status == 200
        decoder = made.decoder_of("a")
        pushed = made.gateways[1].directory.cache
        await until(lambda: len(pushed.elsewhere))
        await made.directory.kill()
        await until(lambda: not made.gateways[1].directory.connected)
        later, began = [user("a"), assistant("x"), user("y" * 20_000)], time.monotonic()
        for url in (made.urls[1], made.urls[0], made.urls[1]):  # even if most of the prompt is new
            assert (await ask(url, later, headers=name)).status == 200
        assert time.monotonic() - began < 2.0
        assert made.decoder_of("a") == decoder
        await made.directory.start()
        await until(lambda: all(gateway.directory.connected for gateway in made.gateways))
        for url in made.urls:
            assert (await ask(url, later, headers=name)).status == 200
        await until(lambda: not any(gateway.directory.unreported for gateway in made.gateways))
        described = (await get(f"{made.urls[0]}/v1/conversations/a"))[1]
        assert described["decoder"] == decoder and described["turns"] > 0


async def test_a_new_gateway_learns_all_bindings_from_the_directory(tmp_path: Path) -> None:
    async with _Killable(tmp_path) as made:
        name = {"x-conversation-id": "a"}
        assert (await ask(made.urls[0], [user("a")], headers=name)).status == 200
        decoder = made.decoder_of("a")
        later = await made.add_gateway()
        await until(lambda: any(key.endswith(":a") for key in later.directory.cache.elsewhere))
        await made.directory.kill()
        await until(lambda: not later.directory.connected)
        began, turn = time.monotonic(), [user("a"), assistant("x"), user("b")]
        assert (await ask(made.urls[-1], turn, headers=name)).status == 200
        assert time.monotonic() - began < 2.0
        assert made.decoder_of("a") == decoder


@pytest.mark.slow
async def test_kill_9_of_the_directory_at_random_moments_loses_no_acknowledged_binding(
    tmp_path: Path,
) -> None:
    rng = random.Random(11)
    async with _Killable(tmp_path) as made:
        acknowledged: dict[str, str] = {}
        stop = False

        async def client(number: int) -> None:
            count = 0
            while not stop:
                name = f"k{number}-{count}"
                count += 1
                answer = await ask(made.urls[number % 2], [user(name)], headers={"x-conversation-id": name})
                if answer.status == 200:
                    acknowledged[name] = made.decoder_of(name)
                else:
                    assert answer.status == 503
                    await asyncio.sleep(0.02)

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        for _ in range(5):
            await asyncio.sleep(rng.uniform(0.2, 1.0))
            await made.directory.kill()
            await made.directory.start()
        await asyncio.sleep(0.5)
        stop = True
        await asyncio.gather(*clients)
        assert len(acknowledged) > 50
        for name, decoder in acknowledged.items():
            status, answer = await get(f"{made.urls[0]}/v1/conversations/{name}")
            assert (status, answer.get("decoder")) == (200, decoder), (name, answer)
