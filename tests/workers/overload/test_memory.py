"""Parameters and KV that give way to each other: what comes back is what was, and no more memory is used."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from workers.overload.config import OverloadConfigError
from workers.overload.membership import EngineMemory
from workers.overload.memfd import MemfdDriver
from workers.overload.memory import LayerWeights, ReservedKv
from workers.overload.pages import PageError, PhysicalMemory, RowsUnmapped
from workers.overload.vllm_internals import PackedWeights

PAGE = 4096
LAYERS, BLOCKS, ROW = 4, 64, (2, 32, 64)  # a row of 16 KiB


@pytest.fixture
def driver() -> MemfdDriver:
    return MemfdDriver(PAGE)


@pytest.fixture
def memory(driver: MemfdDriver) -> Iterator[PhysicalMemory]:
    memory = PhysicalMemory(driver)
    yield memory
    memory.close()


def kv_of(memory: PhysicalMemory, rows: int) -> ReservedKv:
    like = {str(n): torch.empty(BLOCKS, *ROW, device="meta") for n in range(LAYERS)}
    return ReservedKv(like, rows, memory)


def numbered(rows: list[int], layer: int = 0) -> torch.Tensor:
    return torch.stack([torch.full(ROW, float(row + 1000 * layer)) for row in rows])


def test_dropped_parameters_come_back_where_and_as_they_were(memory: PhysicalMemory) -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(LAYERS)]
    before = [[one.detach().clone() for one in layer.parameters()] for layer in layers]
    weights = LayerWeights(layers, memory)
    rows = [layer.weight.data[3] for layer in layers]  # views
    assert weights.held_bytes() == sum(map(weights.layer_bytes, range(LAYERS)))
    weights.drop(range(2))
    assert weights.held_bytes() == sum(map(weights.layer_bytes, range(2, LAYERS)))
    kv = kv_of(memory, 8 * BLOCKS)
    kv.resize([3], 2 * BLOCKS)
    kv.write(3, list(range(2 * BLOCKS)), torch.ones(2 * BLOCKS, *ROW))  # over what the parameters were
    kv.resize([3], BLOCKS)
    weights.restore(range(LAYERS))
    for layer, parameters, row in zip(layers, before, rows, strict=True):
        assert all(map(torch.equal, layer.parameters(), parameters))
        assert row.data_ptr() == layer.weight.data[3].data_ptr() and torch.equal(row, parameters[0][3])


def test_parameters_come_back_as_far_as_there_are_pages(memory: PhysicalMemory) -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(LAYERS)]
    before = [layer.weight.detach().clone() for layer in layers]
    weights = LayerWeights(layers, memory)
    weights.drop(range(2))
    taken = memory.take(weights.layer_bytes(0) // PAGE)
    assert [weights.bring_back(0), weights.bring_back(1)] == [True, False]
    memory.put(taken)
    assert [weights.bring_back(0), weights.bring_back(1)] == [True, True]
    assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before, strict=True))


def test_what_came_back_in_part_is_not_back(
    memory: PhysicalMemory, driver: MemfdDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(LAYERS)]
    before = layers[0].weight.detach().clone()
    weights = LayerWeights(layers, memory)
    weights.drop([0])

    def half(target: torch.Tensor, source: torch.Tensor) -> None:
        target[: len(target) // 2] = source[: len(source) // 2]
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(driver, "copy_beside", half)
    with pytest.raises(RuntimeError):
        weights.bring_back(0)
    assert weights.held_bytes() == sum(map(weights.layer_bytes, range(1, LAYERS)))
    weights.restore([0])
    assert torch.equal(layers[0].weight, before) and memory.free_pages == 0


def test_what_is_packed_of_weights_leaves_and_is_made_of_those_that_came_back(memory: PhysicalMemory) -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 1024, bias=False)) for _ in range(LAYERS)]
    rows = torch.randn(8, 512)
    packed = PackedWeights(layers)  # a model that vLLM has not prepared has none
    packed.make(0)
    for (linear,) in layers:
        dispatch_cpu_unquantized_gemm(linear, remove_weight=False)
    packed = PackedWeights(layers)
    weights = LayerWeights(layers, memory, packed)
    made = [linear.cpu_linear for (linear,) in layers]
    before = [computes(rows, None, None) for computes in made]
    plain = torch.nn.functional.linear
    assert plain not in made
    left = weakref.ref(made.pop(0))
    weights.drop([0])
    assert left() is None and layers[0][0].cpu_linear is plain
    assert weights.bring_back(0)
    weights.drop([1])
    weights.restore(range(LAYERS))
    for (linear,), wanted in zip(layers, before, strict=True):
        assert linear.cpu_linear is not plain
        assert torch.equal(linear.cpu_linear(rows, None, None), wanted)
    assert [linear.cpu_linear for (linear,) in layers[2:]] == made[1:], "what stayed is not packed again"


def test_a_parameter_with_another_order_of_strides_is_moved_as_it_is(memory: PhysicalMemory) -> None:
    layer = torch.nn.Linear(64, 96, bias=False)
    layer.weight.data = layer.weight.data.t().contiguous().t()
    before = layer.weight.detach().clone()
    LayerWeights([layer], memory)
    assert layer.weight.stride() == (1, 96) and torch.equal(layer.weight, before)


def test_parameters_that_share_memory_are_refused(memory: PhysicalMemory) -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    layer.weight.data = torch.empty(2, 64, 64)[0]
    with pytest.raises(OverloadConfigError, match="layer 0 share memory"):
        LayerWeights([layer], memory)


def test_a_split_takes_the_pages_of_what_it_drops_and_no_more(
    memory: PhysicalMemory, driver: MemfdDriver
) -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(LAYERS)]
    weights = LayerWeights(layers, memory)
    sizes = [weights.layer_bytes(n) for n in range(LAYERS)]
    there_is = EngineMemory(BLOCKS, 16 << 10, sizes, PAGE)
    kv, used = kv_of(memory, there_is.most_rows()), [1, 5, 60]
    for layer in range(LAYERS):
        kv.write(layer, list(range(BLOCKS)), numbered(list(range(BLOCKS)), layer))
    pages, most = memory.pages, driver.used_bytes()
    assert memory.free_pages == 0 and most <= pages * PAGE
    kept, gone = range(2), range(2, LAYERS)
    rows = there_is.rows_that_fit(kept)
    assert rows > 2 * BLOCKS  # both halves of the KV, and what the parameters were
    views = dict(kv.views(BLOCKS))

    weights.drop(gone)
    kv.set_aside(gone, used)
    kv.resize(kept, rows)
    new = list(range(BLOCKS, rows))
    for layer in kept:
        assert not kv.read(layer, new).any(), "what parameters were is no KV"
        kv.write(layer, new, numbered(new, layer))
        assert torch.equal(views[str(layer)], numbered(list(range(BLOCKS)), layer))
    assert (memory.pages, driver.used_bytes()) <= (pages, most)
    with pytest.raises(PageError, match="pages are wanted"):
        kv.resize(kept, rows + 1)

    assert torch.equal(kv.read(3, used), numbered(used, 3))  # as long as it may have to come back
    kv.forget_aside()
    with pytest.raises(RowsUnmapped):
        kv.read(3, used)
    for layer in gone:
        kv.write(layer, used, numbered(used, layer + 10))  # as it comes back from a peer, in pieces
    kv.resize(kept, BLOCKS)
    weights.restore(gone)
    kv.put_back(BLOCKS)
    assert torch.equal(kv.read(3, used), numbered(used, 13)) and not kv.read(3, [2]).any()
    assert torch.equal(kv.read(0, [7]), numbered([7])) and memory.free_pages == 0
    assert (memory.pages, driver.used_bytes()) <= (pages, most)


def test_what_was_set_aside_is_put_back_where_the_exchange_failed(memory: PhysicalMemory) -> None:
    kv, used = kv_of(memory, 4 * BLOCKS), [0, 9, 63]
    for layer in range(LAYERS):
        kv.write(layer, used, numbered(used, layer))
    kv.set_aside([2, 3], used)
    kv.resize([0], 2 * BLOCKS)
    kv.resize([0], BLOCKS)
    kv.put_back(BLOCKS)
    assert all(torch.equal(kv.read(layer, used), numbered(used, layer)) for layer in range(LAYERS))


@pytest.mark.parametrize("fewer", [1, 20, 63, 64, 70])
def test_regions_close_up(memory: PhysicalMemory, fewer: int) -> None:
    """Also where more is left of one than is between its old place and its new one."""
    rows, regions = 71, 3
    memory.create(regions * rows * (16 << 10))
    kv = kv_of(memory, regions * rows)
    kv.resize([1], regions * rows)
    every = list(range(regions * rows))
    kv.write(1, every, numbered(every))
    kv.narrow([1], regions, rows, fewer)
    left = [region * rows + row for region in range(regions) for row in range(fewer)]
    assert torch.equal(kv.read(1, list(range(regions * fewer))), numbered(left))
    assert memory.free_pages == regions * rows * 4 - (regions * fewer - BLOCKS) * 4


def test_blocks_move_within_their_region(memory: PhysicalMemory) -> None:
    kv = kv_of(memory, BLOCKS)
    kv.write(0, list(range(BLOCKS)), numbered(list(range(BLOCKS))))
    kv.move([0], {7: 1, 6: 2}, offset=16)
    assert [float(kv.read(0, [row]).mean()) for row in (1, 2, 17, 18, 23)] == [1, 2, 23, 22, 23]


def test_rows_without_memory_are_refused_and_do_not_end_the_process(memory: PhysicalMemory) -> None:
    kv = kv_of(memory, 2 * BLOCKS)
    for rows in ([BLOCKS], [-1], [0, 2 * BLOCKS]):
        with pytest.raises(RowsUnmapped):
            kv.read(0, rows)
        with pytest.raises(RowsUnmapped):
            kv.write(0, rows, numbered(rows))


def test_released_kv_is_the_systems_again(memory: PhysicalMemory, driver: MemfdDriver) -> None:
    """As that is on which graphs are tried before it is known how much KV there will be."""
    kv = kv_of(memory, 2 * BLOCKS)
    kv.write(0, [1], numbered([1]))
    pages = memory.pages
    kv.release()
    memory.trim()
    assert (memory.pages, driver.used_bytes()) == (0, 0)
    kv = kv_of(memory, 2 * BLOCKS)
    assert memory.pages == pages and not kv.read(0, [1]).any()
