"""A piece holds each block's bytes, layer after layer, whichever mover made it."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.checkpoint.host_memory import CudaMover, HostMover, Mover

BLOCKS = 6


@pytest.fixture
def device() -> list[Any]:
    """Two layers, of different types."""
    torch.manual_seed(0)
    return [torch.randn(BLOCKS, 2, 3, 4), torch.randn(BLOCKS, 2, 5, 4).to(torch.bfloat16)]


@pytest.fixture(params=[HostMover, CudaMover])
def mover(request: pytest.FixtureRequest, device: list[Any], monkeypatch: pytest.MonkeyPatch) -> Mover:
    """CUDA's without a stream and without pinned memory: what it computes, not when."""
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **more: Any) -> Any:
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    stream = SimpleNamespace(synchronize=lambda: None, wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    make: Callable[[list[Any]], Mover] = request.param
    return make(device)


def bytes_of(device: list[Any], block: int) -> bytes:
    return b"".join(bytes(layer[block].view(torch.uint8).numpy().tobytes()) for layer in device)


def test_a_row_is_a_block(mover: Mover, device: list[Any]) -> None:
    piece = mover.from_device([4, 1])
    assert [row.tobytes() for row in piece] == [bytes_of(device, 4), bytes_of(device, 1)]


def test_blocks_go_where_they_are_told_and_nowhere_else(mover: Mover, device: list[Any]) -> None:
    before = [bytes_of(device, block) for block in range(BLOCKS)]
    mover.from_device([4, 1])
    mover.to_device([0, 5])
    assert [bytes_of(device, block) for block in range(BLOCKS)] == [before[4], *before[1:5], before[1]]


def test_a_piece_is_a_whole_number_of_blocks_however_large_one_is(
    device: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.checkpoint.host_memory.HOST_PIECE_BYTES", 1)
    assert HostMover(device).bounce.shape == (1, len(bytes_of(device, 0)))
    monkeypatch.setattr("kvtransfer.checkpoint.host_memory.HOST_PIECE_BYTES", 1000)
    assert HostMover(device).bounce.dtype == np.uint8 and len(HostMover(device).bounce) == 1000 // 176


def test_a_load_comes_after_what_was_launched_when_it_was_ordered(
    device: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step before may still write to blocks that were freed and given to the load's request."""
    done: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.when = "nothing"

        def record(self) -> None:
            self.when = "the step before"

    stream = SimpleNamespace(
        synchronize=lambda: done.append("load"), wait_event=lambda event: done.append(event.when)
    )
    empty = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **more: Any) -> Any:
        return empty(*shape, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    mover = CudaMover(device)
    mover.mark()
    mover.to_device([0])
    assert done == ["the step before", "load"]
