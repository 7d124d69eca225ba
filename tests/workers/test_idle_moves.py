"""A keeper sends an idle conversation's KV: its engine exports the KV, and the other engine fetches it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtransfer.control.control_socket import ControlSocketError
from tests.support.fake_engine import FakeEngine
from workers.keeper.engine_status import EngineLink, SentKv, StatusStore
from workers.keeper.idle_moves import KvSender

TOKENS = tuple(range(100))


class HeldTokens(EngineLink):
    """Control socket of an engine that holds one conversation."""

    def __init__(self, tokens: tuple[int, ...] | None) -> None:
        super().__init__("d0", Path("/nowhere"))
        self._tokens = tokens

    async def tokens(self, conversation: str) -> tuple[tuple[int, ...], str]:
        if self._tokens is None:
            raise ControlSocketError("no such command")
        return self._tokens, "salt"


@dataclass
class SendingPair:
    source: FakeEngine
    target: FakeEngine

    async def send(self, tokens: tuple[int, ...] | None = TOKENS) -> SentKv:
        store = StatusStore("d0")
        store.engine_up(replace(self.source.info, epoch=7))
        sender = KvSender(HeldTokens(tokens), store, "small", "key")
        return await sender.send("conversation", self.target.info.http)


@pytest.fixture
async def engines() -> AsyncIterator[SendingPair]:
    made = SendingPair(FakeEngine("d0", cached=96), FakeEngine("d1", cached=99))
    for engine in (made.source, made.target):
        await engine.start()
    yield made
    for engine in (made.source, made.target):
        await engine.stop()


async def test_both_engines_get_the_same_prompt_and_the_target_owns_the_conversation(
    engines: SendingPair,
) -> None:
    assert await engines.send() == SentKv(True, 0)
    (sends,), (gets,) = engines.source.seen, engines.target.seen
    for seen in (sends, gets):
        assert (seen.body["prompt"], seen.body["max_tokens"], seen.body["cache_salt"]) == (
            [*TOKENS],
            1,
            "salt",
        )
        assert seen.headers["x-conserve-key"] == "key"
    assert sends.conversation == "" and gets.conversation == "conversation"
    assert sends.params["do_remote_decode"] and gets.params["do_remote_prefill"]
    assert sends.params["transfer_id"] == gets.params["transfer_id"]
    source = (gets.params["remote_host"], gets.params["remote_port"], gets.params["remote_epoch"])
    assert source == ("127.0.0.1", engines.source.port, 7)


async def test_tokens_that_either_engine_recomputed_are_reported(engines: SendingPair) -> None:
    engines.target.cached = 0
    assert await engines.send() == SentKv(True, 96)


async def test_a_conversation_that_cannot_be_sent_is_reported_as_not_sent(engines: SendingPair) -> None:
    assert await engines.send(tokens=()) == SentKv(False)
    assert await engines.send(tokens=None) == SentKv(False)
    assert engines.source.seen == engines.target.seen == []
    engines.target.fail_status = 503
    assert await engines.send() == SentKv(False)
