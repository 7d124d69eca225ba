"""Loads into freed blocks wait for kernels of an aborted iteration that still write to them."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtransfer.checkpoint.copier import Copier
from kvtransfer.checkpoint.copy_orders import BlockCopy, BlockLoad, CheckpointOrder
from kvtransfer.checkpoint.cuda_mover import CudaMover
from kvtransfer.checkpoint.host_slots import HostSlots, block_bytes
from kvtransfer.side_stream import SideStream
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.staging import StagedBlockMemory
from tests.support.device import LateCuda

BLOCKS = 8
Restore = Callable[[], None]


@pytest.fixture
def cuda() -> LateCuda:
    return LateCuda()


@pytest.fixture
def kv() -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(BLOCKS, 2, 4, 8) for _ in range(3)]


def abort_in_layer(cuda: LateCuda, kv: list[Any], blocks: list[int], layer: int) -> None:
    """Abort an iteration while the kernels of its first layers are launched but have not run."""
    for tensor in kv[:layer]:
        cuda.compute.launch(lambda tensor=tensor: tensor[blocks].copy_(tensor[blocks]))
        cuda.compute.launch(lambda tensor=tensor: tensor.__setitem__(blocks, 7.0))


def from_the_host(cuda: LateCuda, kv: list[Any], ordered: bool) -> Any:
    mover = CudaMover(kv, cuda)
    mover.mark()  # the mark of an earlier order
    if not ordered:
        mover.mark = lambda: None  # type: ignore[method-assign]
    copier = Copier(HostSlots(BLOCKS, block_bytes(kv)), mover)
    copier.submit(CheckpointOrder(stores=[BlockCopy(block, block, 1) for block in (1, 2)]))
    until(lambda: bool(copier.take_report().stored))

    def load() -> None:
        copier.submit(CheckpointOrder(loads=[BlockLoad("r", [BlockCopy(5, 1, 1), BlockCopy(6, 2, 1)])]))
        until(lambda: bool(copier.take_ended().requests))
        copier.close()

    return load


def from_a_prefiller(cuda: LateCuda, kv: list[Any], ordered: bool) -> Any:
    memory = StagedBlockMemory({str(n): tensor for n, tensor in enumerate(kv)}, BLOCKS, 1 << 20, cuda)
    memory.mark()  # the mark of an earlier order
    theirs = [tensor[1:3].numpy().tobytes() for tensor in kv]

    def receive() -> None:
        if ordered:
            memory.mark()
        for layer, blocks in enumerate(theirs):
            with memory.incoming(layer, [5, 6], 1) as views:
                (view,) = views  # of both blocks, one after the other
                view[:] = blocks
        memory.close()

    return receive


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("way", [from_the_host, from_a_prefiller])
def test_loads_begin_after_the_writes_of_an_aborted_iteration(
    way: Callable[..., Restore], layer: int, cuda: LateCuda, kv: list[Any]
) -> None:
    restore = way(cuda, kv, ordered=True)
    wanted = [tensor[[1, 2]].clone() for tensor in kv]
    abort_in_layer(cuda, kv, [4, 5, 6], layer)
    restore()
    cuda.compute.finish()
    assert all(torch.equal(tensor[[5, 6]], one) for tensor, one in zip(kv, wanted, strict=True))


@pytest.mark.parametrize("way", [from_the_host, from_a_prefiller])
def test_without_the_event_loaded_kv_would_be_overwritten(
    way: Callable[..., Restore], cuda: LateCuda, kv: list[Any]
) -> None:
    """Show that the previous test can fail: without the event the bytes are wrong."""
    restore = way(cuda, kv, ordered=False)
    abort_in_layer(cuda, kv, [4, 5, 6], 3)
    restore()
    cuda.compute.finish()
    assert all(bool((tensor[[5, 6]] == 7).all()) for tensor in kv)


def test_a_layer_is_sent_when_it_is_computed_and_its_hook_waits_for_nothing(
    cuda: LateCuda, kv: list[Any]
) -> None:
    """The thread that launches the step only records an event for each layer."""
    memory = StagedBlockMemory({str(n): tensor for n, tensor in enumerate(kv)}, BLOCKS, 1 << 20, cuda)
    exports = Exports(memory, 4, 10, time.monotonic)
    exports.open("t", [[3]], total_tokens=4, prompt="p")
    exports.begin_step([("t", 4)])
    computed = []
    for layer, tensor in enumerate(kv):
        cuda.compute.launch(lambda layer=layer, tensor=tensor: computed.append(tensor[3].fill_(layer)))
        exports.after_layer(layer)
    reader = exports.attach("t", "p", [0], 1)
    sent: list[int] = []
    while len(sent) < len(kv):
        for layer, _, blocks in exports.wait_ready(reader, 5).runs:
            with memory.outgoing(layer, blocks, 1) as (view,):
                assert bytes(view) == bytes(kv[layer][3].numpy().tobytes()) and (kv[layer][3] == layer).all()
            sent.append(layer)
    assert sorted(sent) == [0, 1, 2]
    memory.close()


def test_an_exception_during_a_launch_leaves_nothing_running(cuda: LateCuda) -> None:
    """Work launched before the exception is waited for, because its memory may be reused afterwards."""
    stream, wrote = SideStream(cuda), torch.zeros(4)
    with pytest.raises(MemoryError), stream.launching():
        wrote.copy_(torch.ones(4))
        raise MemoryError
    assert wrote.sum() == 4


def test_a_launching_thread_uses_the_device_of_its_rank(cuda: LateCuda, kv: list[Any]) -> None:
    """A new thread would otherwise start on device 0 and leave a CUDA context there."""
    cuda.set_device(3)
    stream, devices = SideStream(cuda), []

    def launch() -> None:
        devices.append(cuda.current_device())
        with stream.launching():
            devices.append(cuda.current_device())

    memory = StagedBlockMemory({"0": kv[0]}, BLOCKS, 1 << 20, cuda)
    memory.publish(lambda: devices.append(cuda.current_device()))
    until(lambda: devices == [3])
    memory.close()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(10)
    assert devices == [3, 0, 3]


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.001)
