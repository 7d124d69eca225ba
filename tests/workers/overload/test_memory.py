"""KV uses the memory of dropped parameters and gives it back: restored content is unchanged."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from tests.workers.overload.resident import resident_bytes
from workers.engine.compat.split_runner import PackedWeights
from workers.engine.overload.config import OverloadConfigError
from workers.engine.overload.pages.cpu_pages import CpuPageDriver, PageError
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv, RowsUnmapped
from workers.engine.overload.pages.physical_memory import PhysicalMemory
from workers.engine.overload.split.membership import EngineMemory

PAGE = 4096
LAYERS, BLOCKS, ROW = 4, 64, (2, 32, 64)  # a row of 16 KiB


@pytest.fixture
def memory() -> Iterator[PhysicalMemory]:
    memory = PhysicalMemory(CpuPageDriver(PAGE))
    yield memory
    for one in list(memory.ranges):
        memory.release(one)


def kv_of(memory: PhysicalMemory, rows: int) -> ReservedKv:
    like = {str(n): torch.empty(BLOCKS, *ROW, device="meta") for n in range(LAYERS)}
    return ReservedKv(like, rows, memory)


def numbered(rows: list[int], layer: int = 0) -> torch.Tensor:
    return torch.stack([torch.full(ROW, float(row + 1000 * layer)) for row in rows])


def test_restored_parameters_have_the_same_address_and_content_as_before(memory: PhysicalMemory) -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(LAYERS)]
    before = [[one.detach().clone() for one in layer.parameters()] for layer in layers]
    weights = LayerWeights(layers, memory)
    rows = [layer.weight.data[3] for layer in layers]  # views
    assert weights.mapped_bytes() == sum(map(weights.layer_bytes, range(LAYERS)))
    weights.drop(range(2))
    assert weights.mapped_bytes() == sum(map(weights.layer_bytes, range(2, LAYERS)))
    kv = kv_of(memory, 8 * BLOCKS)
    kv.resize([3], 2 * BLOCKS)
    kv.write(3, list(range(2 * BLOCKS)), torch.ones(2 * BLOCKS, *ROW))  # over the parameters
    kv.resize([3], BLOCKS)
    weights.restore(range(LAYERS))
    for layer, parameters, row in zip(layers, before, rows, strict=True):
        assert all(map(torch.equal, layer.parameters(), parameters))
        assert row.data_ptr() == layer.weight.data[3].data_ptr() and torch.equal(row, parameters[0][3])


def test_dropped_layers_lose_packed_weights_and_restored_ones_get_new_ones(memory: PhysicalMemory) -> None:
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
    weights.drop([1])
    weights.restore(range(LAYERS))
    for (linear,), wanted in zip(layers, before, strict=True):
        assert linear.cpu_linear is not plain
        assert torch.equal(linear.cpu_linear(rows, None, None), wanted)
    assert [linear.cpu_linear for (linear,) in layers[2:]] == made[1:], "what stayed is not packed again"


def test_a_transposed_parameter_keeps_its_strides(memory: PhysicalMemory) -> None:
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


def test_a_split_uses_no_more_memory_than_the_whole_model(
    memory: PhysicalMemory,
) -> None:
    layers = [torch.nn.Linear(512, 1024) for _ in range(LAYERS)]
    weights = LayerWeights(layers, memory)
    sizes = [weights.layer_bytes(n) for n in range(LAYERS)]
    there_is = EngineMemory(BLOCKS, 16 << 10, sizes, PAGE)
    kv, used = kv_of(memory, there_is.most_rows()), [1, 5, 60]
    for layer in range(LAYERS):
        kv.write(layer, list(range(BLOCKS)), numbered(list(range(BLOCKS)), layer))
    most = resident_bytes(memory)
    assert not memory.free
    kept, gone = range(2), range(2, LAYERS)
    rows = there_is.rows_that_fit(kept)
    assert rows > 2 * BLOCKS  # the KV of all layers, and the memory of the dropped parameters
    views = dict(kv.views(BLOCKS))

    weights.drop(gone)
    kv.drop(gone, used)
    kv.resize(kept, rows)
    new = list(range(BLOCKS, rows))
    for layer in kept:
        assert not kv.read(layer, new).any(), "what parameters were is no KV"
        kv.write(layer, new, numbered(new, layer))
        assert torch.equal(views[str(layer)], numbered(list(range(BLOCKS)), layer))
    assert resident_bytes(memory) <= most
    with pytest.raises(PageError, match="pages are needed"):
        kv.resize(kept, rows + 1)

    ((rows, values),) = kv.on_host[3]
    assert rows == used and torch.equal(values, numbered(used, 3))
    for layer in gone:
        kv.on_host[layer] = [(used, numbered(used, layer + 10))]  # as it comes back from a peer
    kv.resize(kept, BLOCKS)
    weights.restore(gone)
    kv.restore(BLOCKS)
    assert torch.equal(kv.read(3, used), numbered(used, 13)) and not kv.read(3, [2]).any()
    assert torch.equal(kv.read(0, [7]), numbered([7])) and not memory.free
    assert resident_bytes(memory) <= most


def test_kv_on_the_host_is_restored_after_a_failed_exchange(memory: PhysicalMemory) -> None:
    kv, used = kv_of(memory, 4 * BLOCKS), [0, 9, 63]
    for layer in range(LAYERS):
        kv.write(layer, used, numbered(used, layer))
    kv.drop([2, 3], used)
    kv.resize([0], 2 * BLOCKS)
    kv.resize([0], BLOCKS)
    kv.restore(BLOCKS)
    assert all(torch.equal(kv.read(layer, used), numbered(used, layer)) for layer in range(LAYERS))


def test_blocks_keep_their_content_when_their_numbers_change(memory: PhysicalMemory) -> None:
    kv = kv_of(memory, BLOCKS)
    kv.write(0, list(range(BLOCKS)), numbered(list(range(BLOCKS))))
    kv.move([0], {7: 1, 6: 2})
    assert [float(kv.read(0, [row]).mean()) for row in (1, 2, 6, 7)] == [7, 6, 6, 7]


def test_access_to_kv_rows_without_memory_is_refused(memory: PhysicalMemory) -> None:
    kv = kv_of(memory, 2 * BLOCKS)
    for rows in ([BLOCKS], [-1], [0, 2 * BLOCKS]):
        with pytest.raises(RowsUnmapped):
            kv.read(0, rows)
        with pytest.raises(RowsUnmapped):
            kv.write(0, rows, numbered(rows))


def test_released_kv_returns_its_pages(memory: PhysicalMemory) -> None:
    """vLLM captures graphs on a first allocation of KV, before it knows the size of the pool."""
    kv = kv_of(memory, 2 * BLOCKS)
    kv.write(0, [1], numbered([1]))
    pages = sum(one.pages for one in memory.ranges)
    kv.release()
    memory.trim()
    assert not memory.ranges and not memory.free
    kv = kv_of(memory, 2 * BLOCKS)
    assert sum(one.pages for one in memory.ranges) == pages and not kv.read(0, [1]).any()
