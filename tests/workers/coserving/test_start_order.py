"""Offline requests with KV on the host start in the policy's order, in vLLM's scheduler without a model."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.plugins import Plugin, SchedulerSide
from tests.workers.coserving.model_free import BLOCK, ModelFreeEngine

ON_HOST = {"first": 3, "second": 0, "third": 1}


class ToldByTheTest(SchedulerSide):
    """Stand-in for the checkpoint: the test sets how many blocks of each request are on the host."""

    offline_may_start = True

    def saved_blocks(self, request_id: str) -> int:
        return 0

    def restorable_blocks(self, request: Any, computed_tokens: int) -> int:
        return ON_HOST[request.request_id]


class TableOfTheHost(Plugin):
    name = "checkpoint"
    scheduler = ToldByTheTest


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("bros", ["second", "third", "first"]), ("sarathi", ["first", "second", "third"])],
)
def test_bros_starts_offline_requests_by_blocks_to_restore(
    small_model: Path, policy: str, expected: list[str]
) -> None:
    engine = ModelFreeEngine(small_model, policy=policy, plugins=(f"{__name__}:TableOfTheHost",))
    for at, key in enumerate(ON_HOST):
        engine.ask(key, [40 + at] * (5 * BLOCK), 1, priority=1)  # an iteration has room for one prompt
    ended: list[str] = []
    for _ in range(20):
        engine.step(abort_share=0.0)
        ended += [key for key, output in engine.outputs.items() if output and key not in ended]
    assert ended == expected
