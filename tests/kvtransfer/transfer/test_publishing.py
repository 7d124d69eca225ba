"""Blocks can be sent once they are computed, from the KV in place or through staging memory."""

from collections.abc import Callable

import pytest
import torch

from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.kv_memory import BlockMemory, HostBlockMemory, layout_fingerprint
from kvtransfer.transfer.staging import StagedBlockMemory
from kvtransfer.transfer.wire import TransferRefused

BLOCKS, BLOCK_TOKENS = 10, 4


def caches() -> dict[str, "torch.Tensor"]:
    return {f"layer{n}": torch.randn(BLOCKS, 2, BLOCK_TOKENS, 8) for n in range(2)}


def bytes_of(tensor: "torch.Tensor") -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("kind", ["in place", "staged"])
def test_published_blocks_are_read_unchanged(kind: str) -> None:
    kv = caches()
    memory: BlockMemory = (
        HostBlockMemory(kv, BLOCKS) if kind == "in place" else StagedBlockMemory(kv, BLOCKS, 2 << 20)
    )
    exports = Exports(memory, BLOCK_TOKENS, 10, lambda: 0.0)
    exports.open("t", [[7, 3]], total_tokens=7, prompt="p")
    reader = exports.attach("t", "p", [0], 0)
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
        with memory.outgoing(layer, [block], 1) as (view,):
            assert bytes(view) == bytes_of(kv[f"layer{layer}"][block])
    memory.close()


def test_a_late_copy_is_not_published_if_the_prefill_has_lost_its_blocks() -> None:
    late: list[Callable[[], None]] = []

    class Slow(HostBlockMemory):
        def publish(self, done: Callable[[], None]) -> None:
            late.append(done)

    exports = Exports(Slow(caches(), BLOCKS), BLOCK_TOKENS, 10, lambda: 0.0)
    exports.open("t", [[1]], total_tokens=4, prompt="p")
    exports.begin_step([("t", 4)])
    exports.after_layer(0)
    exports.void("t")
    exports.open("t", [[2]], total_tokens=4, prompt="p")
    for done in late:
        done()
    with pytest.raises(TransferRefused, match="stalled"):
        exports.wait_ready(exports.attach("t", "p", [0], 0), 0.01)


def test_layout_fingerprints_differ_if_shape_or_type_of_blocks_differs() -> None:
    same = layout_fingerprint([torch.zeros(10, 2, 4, 8)], 10)
    assert layout_fingerprint([torch.zeros(99, 2, 4, 8)], 99) == same
    assert layout_fingerprint([torch.zeros(10, 2, 4, 8, dtype=torch.bfloat16)], 10) != same
    assert layout_fingerprint([torch.zeros(10, 2, 8, 8)], 10) != same
