"""Requests that only bring KV back, on a co-serving engine: vLLM's scheduler, without a model."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.plugins import LATER, Match, Plugin, SchedulerSide
from tests.workers.coserving.model_free import BLOCK, ModelFreeEngine
from workers.engine.coserving.config import PROMPT_SCHEDULER, SCHEDULER_CLASS

AHEAD = {"brings_back": {"conversation": "s", "due_in_s": 60.0}}
BLOCKS = 4


class HostOfOneConversation(SchedulerSide):
    """In place of the checkpoint."""

    offline_may_start = True

    def saved_blocks(self, request_id: str) -> int:
        return 0

    def restorable_blocks(self, request: Any, computed_tokens: int) -> int:
        return max(0, BLOCKS - computed_tokens // BLOCK) if request.request_id == "restore" else 0

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        if request.request_id == "restore" and not self.offline_may_start:
            return LATER
        blocks = self.restorable_blocks(request, computed_tokens)
        return Match(blocks * BLOCK, background=True) if blocks else None


class OneConversation(Plugin):
    name = "checkpoint"
    scheduler = HostOfOneConversation


@pytest.mark.parametrize(
    ("scheduler", "overlapping"),
    [(SCHEDULER_CLASS, False), (PROMPT_SCHEDULER, False), (PROMPT_SCHEDULER, True)],
)
def test_a_restore_is_not_behind_a_backlog_and_computes_nothing(
    small_model: Path, scheduler: str, overlapping: bool
) -> None:
    engine = ModelFreeEngine(
        small_model, scheduler=scheduler, overlapping=overlapping, plugins=(f"{__name__}:OneConversation",)
    )
    if scheduler == SCHEDULER_CLASS:  # elsewhere no batch is served
        for number in range(30):
            engine.ask(f"line {number}", [40 + number] * (5 * BLOCK), 20, priority=10)
    prompt = [7] * (BLOCKS * BLOCK + 3)
    engine.ask("restore", prompt, 1, priority=10, transfer=AHEAD)
    for _ in range(3):
        engine.step(abort_share=0.0)
    restore = engine.scheduler.requests["restore"]
    assert restore.status.name == "WAITING_FOR_REMOTE_KVS"
    engine.step(abort_share=0.0, loaded=frozenset({"restore"}))
    assert "restore" not in engine.scheduler.requests
    assert restore.num_output_tokens == 0
    assert not engine.scheduler.restores.waiting
    engine.ask("turn", [*prompt, 9], 1, priority=0)
    turn = engine.scheduler.requests["turn"]
    assert engine.scheduler.cached_tokens(turn) == BLOCKS * BLOCK
