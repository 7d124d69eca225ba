"""Two versions understand each other's messages, and calls without the secret are refused."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import msgspec
import pytest

from placement.engines import EngineInfo, EngineState, Role
from placement.routing.receipts import Refusal, RefusalReason
from placement.sizing.capacity import Action, Recommendation, Signals
from router.directory.api import messages as m
from router.directory.api.rpc import BadReply, Method, NoSecret, Service, Stub, encode
from router.identity.prefix_chain import End

INFO = EngineInfo("d0", "decode", Role.DECODE, 5, "h:1", "h:2", "h:3", 4096, 16, 8192)
STATE = EngineState("d0", 5, 7, 10, 0, 0, 90, 1, 0, confirmed={"a": 6}, parked={"b": 7}, named_after=3)


@dataclass(frozen=True, slots=True)
class Now:
    key: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Later:
    """Message as a newer version defines it, with one field removed and one added."""

    key: str
    reason: str = "none given"


ECHO = Method("/test.Service/Echo", Now, Now)
ECHO_OF_LATER = Method("/test.Service/Echo", Later, Later)
COUNT = Method("/test.Service/Count", Now, Now)


async def echo(message: Now) -> Now:
    if message.key == "wait":
        raise TimeoutError("come back later")
    return message


async def count(message: Now) -> AsyncIterator[Now]:
    for turn in range(message.turn):
        yield Now(message.key, turn)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    service = Service("s3cret", unavailable=(TimeoutError,))
    service.once(ECHO, echo)
    service.stream(COUNT, count)
    server = service.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.mark.parametrize(
    "message",
    [
        m.Ask("k", "g", 5, 1.5, lost=("d0", 3), end=End(b"\x00\xff", 3, b"d")),
        m.PlaceAnswer(1, m.Placed("k", "d0", 5, None, True, "bound", {"at": 1.5}, 9)),
        m.PlaceAnswer(0, refused=Refusal(RefusalReason.SATURATED, "full", 2.0)),
        m.IdentifyReply(2, (m.FoundHolder("c", True, False),), ((0, (3, 2)),)),
        m.ReportRequest("g", (m.Activity("k", 3, ended=m.TurnEnded(1, 2, True, ("e2e",))),), 7),
        m.Push(m.Engines((m.EngineRecord(INFO, STATE, False, 3, 99),), True), (("c", "idle"),), ("f",)),
        m.DirectoryStatus((m.EngineRecord(INFO, STATE, True),), "h:9", ("h:8",), ()),
        m.CapacityReport(
            Signals(0, float("inf"), 0.0, 1, 0.5, 0.25, 3.0), (Recommendation(Action.ADD_DECODERS, 1, "r"),)
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_kind_of_message_arrives_as_it_was_sent(message: object) -> None:
    assert msgspec.msgpack.decode(encode(message), type=type(message)) == message


async def test_a_message_with_unknown_and_missing_fields_is_read(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel, "s3cret")
        assert await stub.ask(ECHO, Now("k", 3), 5.0) == Now("k", 3)
        assert await stub.ask(ECHO_OF_LATER, Later("k", "because"), 5.0) == Later("k")


async def test_an_engine_state_from_another_version_is_read() -> None:
    fields = msgspec.msgpack.decode(encode(STATE))
    later = {**fields, "not_known_here": [1]}
    earlier = {name: value for name, value in fields.items() if name != "named_after"}
    assert msgspec.msgpack.decode(encode(later), type=EngineState) == STATE
    assert msgspec.msgpack.decode(encode(earlier), type=EngineState).named_after == 0


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x00" * 20, encode({"turn": 1}), encode({"key": 5})])
async def test_a_service_refuses_an_invalid_message_and_continues(address: str, data: bytes) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        for call in (channel.unary_unary(ECHO.path), channel.unary_unary(COUNT.path)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(data, metadata=(("x-conserve-secret", "s3cret"),), timeout=5.0)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await Stub(channel, "s3cret").ask(ECHO, Now("k"), 5.0) == Now("k")


async def test_an_unreadable_reply_raises_bad_reply(address: str) -> None:
    wrong = Method("/test.Service/Echo", Now, m.DirectoryStatus)
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(BadReply):
            await Stub(channel, "s3cret").ask(wrong, Now("k"), 5.0)


@pytest.mark.parametrize("secret", ["", "wrong", "s3cre", "s3cret!"])
async def test_calls_without_the_secret_are_refused(address: str, secret: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel, secret)
        with pytest.raises(grpc.aio.AioRpcError, match="secret is missing or wrong"):
            await stub.ask(ECHO, Now("k"), 5.0)
        with pytest.raises(grpc.aio.AioRpcError, match="secret is missing or wrong"):
            await anext(stub.stream(COUNT, Now("k", 3), 5.0))


async def test_a_caller_learns_the_end_of_a_stream_and_the_reason_of_an_error(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = Stub(channel, "s3cret")
        assert [one.turn async for one in stub.stream(COUNT, Now("k", 3), 5.0)] == [0, 1, 2]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ask(ECHO, Now("wait"), 5.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refused.value.details() == "come back later"


def test_a_service_cannot_be_created_without_a_secret() -> None:
    with pytest.raises(NoSecret, match="secret is empty"):
        Service("", unavailable=())
