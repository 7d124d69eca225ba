"""Every mover copies each block to one row of the host, and back to the right block unchanged."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import xxhash
from torch.overrides import TorchFunctionMode

from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.cuda_mover import CudaMover
from kvtransfer.checkpoint.host_slots import (
    THREADS,
    HostMover,
    HostSlots,
    Mover,
    block_bytes,
)
from tests.support.device import LateCuda, LateEvent, LateStream

BLOCKS = 6


@pytest.fixture
def device() -> list[Any]:
    """Return layers with elements of 32, 16 and 8 bits, and one of latent attention."""
    torch.manual_seed(0)
    return [
        torch.randn(BLOCKS, 2, 3, 4),
        torch.randn(BLOCKS, 2, 5, 4).to(torch.bfloat16),
        torch.randn(BLOCKS, 2, 1, 16, 3).to(torch.float8_e4m3fn),
        torch.randn(BLOCKS, 16, 36).to(torch.bfloat16),
    ]


@pytest.fixture(params=[HostMover, lambda device: CudaMover(device, LateCuda())], ids=["host", "cuda"])
def mover(request: pytest.FixtureRequest, device: list[Any]) -> Mover:
    """Return the host mover, or the CUDA mover on streams that run all work as late as permitted."""
    make: Callable[[list[Any]], Mover] = request.param
    return make(device)


def bytes_of(device: list[Any], block: int) -> bytes:
    return b"".join(bytes(layer[block].view(torch.uint8).numpy().tobytes()) for layer in device)


@pytest.fixture
def memory(device: list[Any]) -> HostSlots:
    return HostSlots(BLOCKS, block_bytes(device))


def test_a_row_on_the_host_holds_all_layers_of_one_block(
    mover: Mover, memory: HostSlots, device: list[Any]
) -> None:
    mover.store(memory, [BlockCopy(4, slot=2, generation=1), BlockCopy(1, slot=0, generation=3)])
    assert [memory.rows[slot].tobytes() for slot in (2, 0)] == [bytes_of(device, 4), bytes_of(device, 1)]
    digests = [xxhash.xxh3_64_intdigest(bytes_of(device, block)) for block in (4, 1)]
    assert memory.contents == {2: (1, digests[0]), 0: (3, digests[1])}


def test_blocks_are_moved_to_their_destinations_only(
    mover: Mover, memory: HostSlots, device: list[Any]
) -> None:
    before = [bytes_of(device, block) for block in range(BLOCKS)]
    mover.store(memory, [BlockCopy(4, slot=3, generation=1), BlockCopy(1, slot=5, generation=1)])
    back = [BlockCopy(0, slot=3, generation=1), BlockCopy(5, slot=5, generation=1)]
    assert mover.load(memory, back) == back
    assert [bytes_of(device, block) for block in range(BLOCKS)] == [before[4], *before[1:5], before[1]]


def test_parts_of_one_copy_that_threads_move_do_not_overwrite_each_other(
    mover: Mover, memory: HostSlots, device: list[Any]
) -> None:
    before = [bytes_of(device, block) for block in range(BLOCKS)]
    four, two = (BlockCopy(block, slot=block, generation=1) for block in (4, 2))
    mover.store(memory, [four], at=1)
    mover.store(memory, [two], at=0)
    parts = [(BlockCopy(0, slot=4, generation=1), 1), (BlockCopy(1, slot=2, generation=1), 0)]
    assert [mover.load(memory, [copy], at) for copy, at in parts] == [[copy] for copy, _ in parts]
    assert [bytes_of(device, block) for block in (0, 1)] == [before[4], before[2]]


def test_a_load_reports_blocks_that_changed_since_their_store(
    mover: Mover, memory: HostSlots, device: list[Any]
) -> None:
    mover.store(memory, [BlockCopy(block, slot=block, generation=1) for block in (1, 2, 3)])
    memory.rows[2][-1] ^= 1
    back = [BlockCopy(block, slot=block, generation=1) for block in (1, 2, 3)]
    assert mover.load(memory, [*back, BlockCopy(4, 1, generation=2), BlockCopy(5, 5, 1)]) == [
        back[0],
        back[2],
    ]


def test_each_copying_thread_gets_the_same_whole_number_of_blocks(
    device: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.checkpoint.host_slots.HOST_PART_BYTES", 1)
    assert HostMover(device).at_once == THREADS
    monkeypatch.setattr("kvtransfer.checkpoint.host_slots.HOST_PART_BYTES", 10_000)
    assert HostMover(device).at_once == THREADS * (10_000 // len(bytes_of(device, 0)))


@pytest.mark.parametrize("unit_blocks", [1, 2, 5])
def test_units_of_blocks_that_share_device_memory_do_not_overwrite_each_other(
    unit_blocks: int, memory: HostSlots, device: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of blocks take turns on two streams; the last may be smaller, and slots are in any order."""
    unit = unit_blocks * block_bytes(device)
    monkeypatch.setattr("kvtransfer.checkpoint.cuda_mover.UNIT_BYTES", unit)
    mover = CudaMover(device, LateCuda())
    before = [bytes_of(device, block) for block in range(BLOCKS)]
    slots = [3, 0, 1, 5, 4, 2]
    mover.store(memory, [BlockCopy(block, slot, 1) for block, slot in enumerate(slots)])
    assert [memory.rows[slot].tobytes() for slot in slots] == before
    back = [BlockCopy(block, slot, 1) for block, slot in enumerate(reversed(slots))]
    assert mover.load(memory, back) == back
    assert [bytes_of(device, block) for block in range(BLOCKS)] == before[::-1]


def test_a_unit_is_launched_with_few_calls(memory: HostSlots, device: list[Any]) -> None:
    """There is one call per layer, one for the indices, and one per run of slots."""
    streams: list[LateStream] = []
    cuda = LateCuda()
    cuda.Stream = lambda: streams.append(LateStream()) or streams[-1]  # type: ignore[assignment, func-returns-value]
    mover = CudaMover(device, cuda)
    copies = [BlockCopy(block, slot, 1) for block, slot in ((4, 2), (3, 1), (0, 0), (1, 5))]
    mover.store(memory, copies)
    assert sum(len(stream.launched) for stream in streams) == len(device) + 1 + 2
    mover.load(memory, copies)
    assert sum(len(stream.launched) for stream in streams) == 2 * (len(device) + 1 + 2)


class LockReleases(TorchFunctionMode):
    """Counts calls of torch, of the digest and of events.

    Each call releases the GIL and takes it again, and the model's thread may have to wait for that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = 0
        for owner, name in (
            (xxhash, "xxh3_64_intdigest"),
            *((LateEvent, one) for one in ("record", "synchronize")),
            (LateStream, "wait_event"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.count += 1
            return original(*arguments)

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") not in {
            "__get__",
            "__len__",
        }  # attributes, such as shapes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("step", "most"), [(1, 2.0), (2, 3.3)], ids=["consecutive slots", "scattered slots"])
def test_copies_take_the_gil_only_a_few_times_per_mebibyte(
    step: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are those of Qwen3 8B, in two units of 14 blocks."""
    blocks = 28
    device = [torch.zeros(blocks, 2, 32, 8, 64, dtype=torch.bfloat16) for _ in range(36)]
    memory, mover = HostSlots(step * blocks, block_bytes(device)), CudaMover(device, LateCuda())
    copies = [BlockCopy(block, step * block, 1) for block in range(blocks)]
    mover.store(memory, copies)  # so that views are cached
    mebibytes = blocks * block_bytes(device) / (1 << 20)
    with LockReleases(monkeypatch) as releases:
        mover.store(memory, copies)
        stored, releases.count = releases.count, 0
        assert mover.load(memory, copies) == copies
    assert stored / mebibytes <= most
    assert releases.count / mebibytes <= most


def test_a_failed_store_leaves_no_copy_running(device: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that went on after the failure would overwrite the slots that the next block uses."""
    monkeypatch.setattr("kvtransfer.checkpoint.cuda_mover.UNIT_BYTES", 1)

    class NoRoom(HostSlots):
        def runs(self, copies: list[BlockCopy]) -> Iterator[tuple[int, int]]:
            if copies[0].slot == 2:
                raise MemoryError
            return super().runs(copies)

    memory, mover = NoRoom(BLOCKS, block_bytes(device)), CudaMover(device, LateCuda())
    wanted = bytes_of(device, 1)
    with pytest.raises(MemoryError):
        mover.store(memory, [BlockCopy(1, slot=1, generation=1), BlockCopy(2, slot=2, generation=1)])
    assert memory.rows[1].tobytes() == wanted and not memory.known([BlockCopy(1, 1, 1)])
