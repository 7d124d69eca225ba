"""Storms in which the KV of some prompts arrives iterations later, on vLLM without a model."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.plugins import Match, Plugin, SchedulerSide
from tests.workers.coserving.model_free import BLOCK, ModelFreeEngine
from tests.workers.coserving.overlapped import OverlappedEngine
from tests.workers.coserving.test_rollback import WINDOWS, storm

ARRIVES = 0.2  # probability that a load ends in a step


class SomeLoads(SchedulerSide):
    """Connector that has some blocks of about half of the prompts."""

    def __init__(self, context: Any) -> None:
        self.matched: dict[str, int] = {}  # request -> tokens in the prefix cache
        self.loading: dict[str, tuple[Any, int, int]] = {}  # request, first token of its load, and end

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        rng = random.Random(f"{request.request_id} {computed_tokens}")
        room = (request.num_tokens - 1 - computed_tokens) // BLOCK
        if computed_tokens % BLOCK or room <= 0 or rng.random() < 0.5:
            return None
        self.matched[request.request_id] = computed_tokens
        return Match(rng.randint(1, room) * BLOCK, background=True)

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        if match is not None:
            first = self.matched.pop(request.request_id)
            self.loading[request.request_id] = request, first, first + match.tokens


class SomeLoadsPlugin(Plugin):
    name = "loads"
    scheduler = SomeLoads


class LateLoads(ModelFreeEngine):
    """Engine whose loads end in random iterations, even after the clients have disconnected."""

    loads = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "plugins": (f"{__name__}:SomeLoadsPlugin",)})
        self._load_rng = random.Random(repr(args[1:]))
        self._side = self.scheduler.plugin("loads")

    def loads_ended(self) -> frozenset[str]:
        get_block_ids = self.scheduler.kv_cache_manager.get_block_ids
        arrived = [key for key in self._side.loading if self._load_rng.random() < ARRIVES]
        for key in arrived:
            request, first, end = self._side.loading.pop(key)
            self.fill(request.all_token_ids, get_block_ids(key), first, end)
        self.loads += len(arrived)
        return frozenset(arrived)


class LateOverlapped(LateLoads, OverlappedEngine):
    pass


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("kind", [LateLoads, LateOverlapped])
@pytest.mark.parametrize("seed", [3, 11])
def test_requests_read_only_kv_that_was_computed_or_has_arrived(
    small_model: Path, kind: type[LateLoads], windows: tuple[int, ...], seed: int
) -> None:
    engine = storm(small_model, None, seed, windows=windows, kind=kind)
    assert engine.aborts > 10
    assert engine.loads > 10  # type: ignore[attr-defined]
    assert engine.lies == []
    assert not engine.scheduler.requests
