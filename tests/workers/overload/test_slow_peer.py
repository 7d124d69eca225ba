"""A peer that answers each message in time, and all of them together too late, costs a bounded time: what was
whole stays whole, with its KV; what cannot be had again in time is told to be lost. Without an engine."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from router.directory.dropping import CHANGE_S
from tests.workers.overload import broken
from workers.overload.memory import LayerWeights, ReservedKv
from workers.overload.metrics import SplitEvent
from workers.overload.orders import DropOrder, RestoreOrder, SplitReport
from workers.overload.plugin import FENCE_S
from workers.overload.split import DeviceLock, PeerLine, SplitLimits, SplitModel

LAYERS, BLOCKS, WIDTH = 20, 16, 64
SLOW_S = 0.2  # of each of ten messages
LIMITS = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=1.0)
USED = list(range(1, BLOCKS))


class Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.self_attn = SimpleNamespace(attn=SimpleNamespace(layer_name=name))

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        raise NotImplementedError


class Qwen3ForCausalLM:
    """As much of one as a split is made of."""

    def __init__(self) -> None:
        layers = [Layer(str(number)) for number in range(LAYERS)]
        self.model = SimpleNamespace(layers=layers, embed_input_ids=lambda ids: ids, norm=lambda *seen: seen)


class Engine:
    """A worker between two steps."""

    def __init__(self) -> None:
        model = Qwen3ForCausalLM()
        attention = SimpleNamespace(bind_kv_cache=lambda tensor: None)
        names = [str(number) for number in range(LAYERS)]
        runner = SimpleNamespace(
            get_model=lambda: model,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
            cache_config=SimpleNamespace(block_size=16),
            model_config=SimpleNamespace(get_hidden_size=lambda: WIDTH, dtype=torch.float32),
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, attention)),
            kv_caches=[],
        )
        kv = ReservedKv({name: torch.empty(BLOCKS, 2, 32) for name in names}, 8 * BLOCKS)
        self.device = DeviceLock()
        weights = LayerWeights(model.model.layers)
        line = PeerLine("127.0.0.1", b"a secret only for these tests")
        self.split = SplitModel(runner, kv, weights, BLOCKS, self.device, line)
        self.split.limits = LIMITS
        for layer in range(LAYERS):
            kv.write(layer, USED, torch.randn(len(USED), 2, 32))
        self.had, self.parameters = self.kv(), weights.held_bytes()

    def kv(self) -> list[torch.Tensor]:
        return [self.split.kv.read(layer, USED).clone() for layer in range(LAYERS)]

    @property
    def has_all(self) -> bool:
        return all(map(torch.equal, self.kv(), self.had))

    @property
    def whole(self) -> bool:
        return not self.split.is_split and self.split.weights.held_bytes() == self.parameters

    def step(self, what: Callable[[SplitModel], None]) -> SplitReport:
        with self.device:
            what(self.split)
        report = self.split.take_report()
        assert report is not None
        return report


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    made = Engine(), Engine()
    for engine in made:
        engine.split.take_report()
    yield made
    for engine in made:
        engine.split.close()


def at_once(*steps: Callable[[], SplitReport]) -> tuple[list[SplitEvent], float]:
    """How each ended, and how long the first of them took."""
    ended: dict[int, tuple[SplitReport, float]] = {}

    def run(number: int, step: Callable[[], SplitReport]) -> None:
        began = time.monotonic()
        ended[number] = step(), time.monotonic() - began

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [ended[number][0].event for number in sorted(ended)], ended[0][1]


def drop(engine: Engine, peer: Engine, part: int) -> Callable[[], SplitReport]:
    order = DropOrder(1, peer.split.facts().address, part, USED)
    return lambda: engine.step(lambda split: split.drop(order))


def restore(engine: Engine) -> Callable[[], SplitReport]:
    return lambda: engine.step(lambda split: split.restore(RestoreOrder(1, {}, USED)))


def slow(engine: Engine) -> None:
    engine.split.__class__ = broken.SlowToAnswer
    engine.split.slow_s = SLOW_S  # type: ignore[attr-defined]


def test_a_drop_is_left_in_time_and_nothing_is_lost(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    slow(second)
    ended, seconds = at_once(drop(first, second, 0), drop(second, first, 1))
    assert ended == [SplitEvent.NOT_SPLIT, SplitEvent.NOT_SPLIT]
    assert seconds < LIMITS.order_s + 0.7
    assert all(engine.whole and engine.has_all and not engine.split.lost for engine in engines)


def test_a_restore_is_left_in_time_and_its_kv_is_said_to_be_lost(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    ended, _ = at_once(drop(first, second, 0), drop(second, first, 1))
    assert ended == [SplitEvent.SPLIT, SplitEvent.SPLIT]
    assert not any(engine.whole for engine in engines)
    slow(second)
    ended, seconds = at_once(restore(first), restore(second))
    assert ended == [SplitEvent.LOST, SplitEvent.RESTORED]
    assert seconds < LIMITS.order_s + 0.7
    assert first.whole and first.split.lost
    assert second.whole and second.has_all and not second.split.lost


def test_both_are_split_and_restored_where_nobody_is_slow(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    at_once(drop(first, second, 0), drop(second, first, 1))
    ended, _ = at_once(restore(first), restore(second))
    assert ended == [SplitEvent.RESTORED, SplitEvent.RESTORED]
    assert all(engine.whole and engine.has_all for engine in engines)


def test_the_directory_waits_until_an_order_is_over() -> None:
    assert FENCE_S + SplitLimits().order_s < CHANGE_S
