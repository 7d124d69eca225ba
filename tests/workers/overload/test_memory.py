"""Parameters and KV that give way: their memory is the system's meanwhile; what comes back is what was."""

import psutil
import torch

from workers.overload.memory import LayerWeights, ReservedKv

MIB = 1 << 20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_dropped_parameters_come_back_as_they_were() -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(4)]
    before = [[p.detach().clone() for p in layer.parameters()] for layer in layers]
    views = [layer.weight.data[3] for layer in layers]
    weights = LayerWeights(layers)
    assert weights.held_bytes() == 4 * weights.layer_bytes(0)
    weights.drop(range(2))
    assert weights.held_bytes() == 2 * weights.layer_bytes(0)
    weights.restore(range(2))
    for layer, parameters, row in zip(layers, before, views, strict=True):
        assert all(map(torch.equal, layer.parameters(), parameters))
        assert torch.equal(row, layer.weight.data[3])  # a view from before


def test_rows_are_where_they_were_when_a_pool_grows_and_what_is_forgotten_is_given_back() -> None:
    first = {name: torch.zeros(64, 2, 32, 64) for name in ("a", "b")}
    kv = ReservedKv(first, rows=1_000)
    small = dict(kv.views(64))
    kv.write(0, [5], torch.ones(1, 2, 32, 64))
    large = dict(kv.views(900))
    assert small["a"].data_ptr() == large["a"].data_ptr()
    assert torch.equal(large["a"][5], torch.ones(2, 32, 64)) and not large["b"].any()
    before = resident()
    large["b"].fill_(1.0)
    grown = resident() - before
    kv.forget([1], 0, 1_000)
    assert grown > 10 * MIB and resident() - before < grown / 2
    assert not large["b"].any() and torch.equal(small["a"][5], torch.ones(2, 32, 64))


def test_blocks_move_within_their_region() -> None:
    kv = ReservedKv({"a": torch.zeros(8, 2, 4, 4)}, rows=32)
    for row in range(32):
        kv.write(0, [row], torch.full((1, 2, 4, 4), float(row)))
    kv.move([0], {7: 1, 6: 2}, offset=16)
    assert [float(kv.read(0, [row]).mean()) for row in (1, 2, 17, 18, 23)] == [1, 2, 23, 22, 23]
