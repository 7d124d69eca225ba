"""Measures copies of blocks to pinned host memory and back, with the product's mover and as one plain copy.

A block is spread over all layers on the device, and is one row on the host. Blocks are in random order; their
rows follow one another.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.gpu.results import Figures, bandwidth
from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.cuda_mover import CudaMover, memory_for
from kvtransfer.checkpoint.host_slots import THREADS
from kvtransfer.side_stream import cuda_of

Ways = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class BlockShape:
    layers: int
    blocks: int
    piece_bytes: int
    rounds: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.blocks * self.piece_bytes


def shape_for(device: str) -> BlockShape:
    return BlockShape(36, 512, 64 << 10, 7) if device == "cuda" else BlockShape(4, 16, 4 << 10, 2)


def made_blocks(device: str, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_copies(device: str) -> Figures:
    shape = shape_for(device)
    order = torch.randperm(shape.blocks).tolist()
    found = plain_copy(device, shape)
    blocks = made_blocks(device, shape.layers, shape.blocks, shape.piece_bytes)
    found |= mover_copies(blocks, order, shape)
    found["equal"] = all(value for name, value in found.items() if name.endswith("_equal"))
    return found


def plain_copy(device: str, shape: BlockShape) -> Figures:
    blocks = made_blocks(device, shape.nbytes)
    rows = torch.empty(shape.nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    ways: Ways = {
        "store": lambda: rows.copy_(blocks, non_blocking=True),
        "load": lambda: blocks.copy_(rows, non_blocking=True),
    }
    return measured("plain", ways, blocks, shape)


def mover_copies(by_layer: torch.Tensor, order: list[int], shape: BlockShape) -> Figures:
    """Measure the mover in one thread, and its loads in as many threads as the product's copier has."""
    layers = list(by_layer.unbind())
    mover, memory = CudaMover(layers, cuda_of(by_layer)), memory_for(layers, shape.blocks)
    copies = [BlockCopy(block, slot, 1) for slot, block in enumerate(order)]
    parts = [copies[first : first + mover.at_once] for first in range(0, len(copies), mover.at_once)]
    each = mover.at_once // THREADS
    with ThreadPoolExecutor(THREADS) as threads:

        def load_in_threads() -> None:
            for part in parts:
                first = range(0, len(part), each)
                list(threads.map(lambda at, part=part: mover.load(memory, part[at : at + each], at), first))

        def store() -> None:
            for part in parts:
                mover.store(memory, part)

        ways: Ways = {
            "store": store,
            "load": lambda: [mover.load(memory, part) for part in parts],
            f"load_in_{THREADS}_threads": load_in_threads,
        }
        found = measured("mover", ways, by_layer, shape)
    memory.close()
    return found


def measured(prefix: str, ways: Ways, blocks: torch.Tensor, shape: BlockShape) -> Figures:
    """Store the blocks, then clear and load them in all other ways, in rounds; return the bandwidths.

    `_call_ms_per_gb` is the time until the call returns, `_cpu_ms_per_gb` the CPU time of the whole process.
    """
    device, wanted, equal = blocks.device.type, blocks.clone(), True
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(shape.rounds + 1):
        for name, way in ways.items():
            if name != "store":
                blocks.zero_()
            finish(device)
            began, cpu = time.perf_counter(), time.process_time()
            way()
            called, cpu = time.perf_counter() - began, time.process_time() - cpu
            finish(device)
            taken[name].append((time.perf_counter() - began, called, cpu))
            equal &= torch.equal(blocks, wanted)
    found: Figures = {f"{prefix}_equal": equal}
    for name, rounds in taken.items():
        seconds, calls, cpus = zip(*rounds[1:], strict=True)  # the first round uses memory for the first time
        found |= bandwidth(f"{prefix}_{name}", shape.nbytes, seconds)
        found[f"{prefix}_{name}_call_ms_per_gb"] = statistics.median(calls) / shape.nbytes * 1e12
        found[f"{prefix}_{name}_cpu_ms_per_gb"] = statistics.median(cpus) / shape.nbytes * 1e12
    return found
