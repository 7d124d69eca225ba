"""Measures how fast pages of parameters become KV and parameters again, without a new CUDA graph."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.results import Figures
from workers.engine.overload.pages.cpu_pages import CpuPageDriver
from workers.engine.overload.pages.cuda_pages import CudaPageDriver
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv
from workers.engine.overload.pages.physical_memory import PageDriver, PhysicalMemory


def pages(device: str) -> Figures:
    """Measure how fast two of four layers are dropped to make room for KV, and restored.

    A CUDA graph that was captured before must still compute the same. The bandwidths of `drop` and `restore`
    count parameters; those of `grow` and `shrink` count parameters and KV.
    """
    on_gpu, row = device == "cuda", 1 << 14
    driver: PageDriver = CudaPageDriver(torch.device(device)) if on_gpu else CpuPageDriver()
    memory, width = PhysicalMemory(driver), 8192 if on_gpu else 256
    layers = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(4)]
    weights, kept, gone = LayerWeights(layers, memory), range(2), range(2, 4)
    size = sum(map(weights.layer_bytes, gone))
    blocks = size // 2 // (4 * row)  # as much KV as parameters
    like = {str(layer): torch.empty(blocks, row, device="meta") for layer in range(4)}
    kv = ReservedKv(like, 3 * blocks, memory)
    old, new = list(range(blocks)), list(range(blocks, 3 * blocks))
    kv.write(1, old, torch.ones(blocks, row, device=device))
    passes = LayerPasses(layers, torch.randn(1, width, device=device), graph=on_gpu)
    before = passes.run().clone()

    def taken(what: Callable[[], object]) -> float:
        driver.synchronize()
        began = time.perf_counter()
        what()
        driver.synchronize()
        return time.perf_counter() - began

    def drop() -> None:
        weights.drop(gone)
        kv.drop(gone, [])

    drop_s, grow_s = taken(drop), taken(lambda: kv.resize(kept, 3 * blocks))
    new_is_zero = not kv.read(1, new).any()
    kv.write(1, new, torch.full((len(new), row), 9.0, device=device))
    shrink_s, restore_s = taken(lambda: kv.resize(kept, blocks)), taken(lambda: weights.restore(gone))
    kv.restore(blocks)
    host, plain = driver.host_tensor(size), torch.empty(size, dtype=torch.uint8, device=device)
    plain_s = min(taken(lambda: plain.copy_(host, non_blocking=True)) for _ in range(3))
    equal = new_is_zero and bool((kv.read(1, old) == 1).all()) and torch.equal(passes.run(), before)
    return {
        "page_bytes": driver.page_bytes,
        "equal": equal,
        "drop_gbs": size / drop_s / 1e9,
        "grow_gbs": 2 * size / grow_s / 1e9,  # parameters, and as much KV
        "shrink_gbs": 2 * size / shrink_s / 1e9,
        "restore_gbs": size / restore_s / 1e9,
        "restore_vs_plain_copy": plain_s / restore_s,
    }


class LayerPasses:
    """Runs layers one after another, directly or as a graph that was captured once."""

    def __init__(self, layers: list[torch.nn.Linear], asked: torch.Tensor, graph: bool) -> None:
        self._layers, self._asked = layers, asked
        self._graph: Any = None
        self._given = self._through()
        if graph:
            torch.cuda.synchronize()
            captured: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._given = self._through()
            self._graph = captured

    def _through(self) -> torch.Tensor:
        given = self._asked
        with torch.inference_mode():
            for layer in self._layers:
                given = layer(given)
        return given

    def run(self) -> torch.Tensor:
        if self._graph is None:
            return self._through()
        self._graph.replay()
        torch.cuda.synchronize()
        return self._given
