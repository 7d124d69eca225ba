"""What a step computed becomes readable once it is where it can be read: in place, or in staging memory."""

from collections.abc import Callable, Sequence

import pytest
import torch

from kvtransfer.errors import TransferRefused
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.memory import BlockMemory, HostBlockMemory, StagedBlockMemory, layout_fingerprint

BLOCKS, BLOCK_TOKENS = 10, 4


def caches() -> dict[str, "torch.Tensor"]:
    return {f"layer{n}": torch.randn(BLOCKS, 2, BLOCK_TOKENS, 8) for n in range(2)}


def bytes_of(tensor: "torch.Tensor") -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("kind", ["in place", "staged"])
def test_published_blocks_are_read_as_they_are(kind: str) -> None:
    kv = caches()
    memory: BlockMemory = (
        HostBlockMemory(kv, BLOCKS) if kind == "in place" else StagedBlockMemory(kv, BLOCKS, 4)
    )
    exports = Exports(memory, BLOCK_TOKENS, 10, lambda: 0.0)
    exports.open("t", [7, 3], total_tokens=7, prompt="p")
    reader = exports.attach("t", "p", 0, 0)
    exports.begin_step([("t", 7)])
    for layer in (0, 1):
        exports.after_layer(layer)
    sent: list[tuple[int, int]] = []
    while True:
        ready = exports.wait_ready(reader, 5)
        sent += [(layer, block) for layer, _, blocks in ready.runs for block in blocks]
        if ready.complete:
            break
    assert sorted(sent) == [(0, 3), (0, 7), (1, 3), (1, 7)]
    for layer, block in sent:
        assert bytes(memory.view(layer, block)) == bytes_of(kv[f"layer{layer}"][block])
    memory.close()


def test_received_blocks_reach_the_cache_through_staging() -> None:
    kv = caches()
    wanted = [torch.randn(2, BLOCK_TOKENS, 8) for _ in range(2)]
    memory = StagedBlockMemory(kv, BLOCKS, 2)
    assert memory.reserve([5])
    for layer, block in enumerate(wanted):
        memory.view(layer, 5)[:] = bytes_of(block)
    memory.landed([5])
    assert all(torch.equal(kv[f"layer{n}"][5], wanted[n]) for n in range(2))
    memory.close()


def test_staging_memory_is_shared_by_transfers_of_one_block_and_returned_by_the_last() -> None:
    memory = StagedBlockMemory(caches(), BLOCKS, 2)
    assert memory.reserve([1, 2]) and memory.reserve([2])
    assert not memory.reserve([3])
    memory.release([1, 2])
    assert memory.reserve([3]) and not memory.reserve([4])
    memory.release([2])
    assert memory.reserve([4])
    memory.close()


def test_a_prefill_without_staging_memory_is_refused_not_served_in_part() -> None:
    class Full(HostBlockMemory):
        def reserve(self, blocks: Sequence[int]) -> bool:
            return False

    exports = Exports(Full(caches(), BLOCKS), BLOCK_TOKENS, 10, lambda: 0.0)
    exports.open("t", [1], total_tokens=4, prompt="p")
    exports.extend("t", [2])
    exports.begin_step([("t", 4)])
    exports.after_layer(0)
    with pytest.raises(TransferRefused, match="aborted"):
        exports.attach("t", "p", 0, 0)


def test_a_copy_under_way_when_the_prefill_lost_its_blocks_is_not_announced() -> None:
    late: list[Callable[[], None]] = []

    class Slow(HostBlockMemory):
        def publish(self, layer: int, blocks: Sequence[int], done: Callable[[], None]) -> None:
            late.append(done)

    exports = Exports(Slow(caches(), BLOCKS), BLOCK_TOKENS, 10, lambda: 0.0)
    exports.open("t", [1], total_tokens=4, prompt="p")
    exports.begin_step([("t", 4)])
    exports.after_layer(0)
    exports.void("t")
    exports.open("t", [2], total_tokens=4, prompt="p")
    for done in late:
        done()
    with pytest.raises(TransferRefused, match="stalled"):
        exports.wait_ready(exports.attach("t", "p", 0, 0), 0.01)


def test_engines_with_other_blocks_have_another_layout() -> None:
    same = layout_fingerprint([torch.zeros(10, 2, 4, 8)], 10)
    assert layout_fingerprint([torch.zeros(99, 2, 4, 8)], 99) == same
    assert layout_fingerprint([torch.zeros(10, 2, 4, 8, dtype=torch.bfloat16)], 10) != same
    assert layout_fingerprint([torch.zeros(10, 2, 8, 8)], 10) != same
