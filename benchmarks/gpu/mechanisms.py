"""Mechanisms that need torch and no vLLM, each by itself: equal bytes, or the page says that they are not."""

import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.kv.copies import MadeShape, host_copies, transfer_s, transfers
from benchmarks.kv.processes import between_processes
from kvtransfer.checkpoint.cuda_mover import CudaMover, memory_for
from kvtransfer.checkpoint.scheduler import BlockCopy
from kvtransfer.side_stream import cuda_of
from kvtransfer.transfer.staging import StagedBlockMemory
from workers.coserving.safepoint import RUN_AHEAD, Armed, Flag, SafepointAbort, SafepointWorker
from workers.overload.cuda_pages import CudaDriver
from workers.overload.memfd import MemfdDriver
from workers.overload.memory import LayerWeights, ReservedKv
from workers.overload.pages import PhysicalMemory
from workers.power.nvml import Gpus, PowerError

LAYERS, ROUNDS = 32, 20

Figures = dict[str, Any]


def mechanisms(device: str) -> Figures:
    on_gpu = device == "cuda"
    shape = MadeShape(device=device, blocks=1024) if on_gpu else MadeShape(layers=4, blocks=128)
    parts: dict[str, Callable[[], Figures]] = {
        "host": lambda: host_copies(shape),
        "transfer": lambda: transfers(shape),
        "transfer_between_processes": lambda: between_processes(shape),
        "window": lambda: prompts_through_the_window(shape),
        "kernels": lambda: kernels_beside_copies(shape),
        "load_after_abort": lambda: load_after_abort(device),
        "safepoints": lambda: safepoints(device),
        "pages": lambda: pages_that_change_their_use(device),
    }
    found: Figures = {}
    for name, part in parts.items():
        before = joules()
        try:
            found[name] = part()
        except Exception as error:  # noqa: BLE001  the other parts are worth having; the exit status says so
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        if (after := joules()) is not None and before is not None:
            found[name]["joules"] = after - before
    return found


def joules() -> float | None:
    """Of all GPUs here since the driver was loaded; nothing is set."""
    try:
        with Gpus() as gpus:
            return sum(gpus.joules(gpu.uuid) for gpu in gpus.all())
    except (PowerError, ImportError):
        return None


def prompts_through_the_window(shape: MadeShape) -> Figures:
    """Eight at once, through a hundredth of their KV; `transfers` compares bytes, and so does this."""
    theirs, mine = shape.made(True), shape.made(False)
    size = sum(layer.nbytes for layer in theirs.values())
    cuda = cuda_of(theirs["layer0"])
    producer, consumer = (StagedBlockMemory(kv, shape.blocks, size // 100, cuda) for kv in (theirs, mine))
    seconds = transfer_s(producer, consumer, shape, 8)
    producer.close()
    consumer.close()
    equal = all(torch.equal(mine[name], layer) for name, layer in theirs.items())
    return {"tokens": shape.blocks * shape.block_tokens, "gbs": size / seconds / 1e9, "equal": equal}


def load_after_abort(device: str) -> Figures:
    """A kernel that an aborted iteration left still writes to a block that is loaded meanwhile."""
    layers = [torch.randn(16, 8, 16, 256, device=device) for _ in range(4)]
    wanted = [layer[1].clone() for layer in layers]
    mover, memory = CudaMover(layers, cuda_of(layers[0])), memory_for(layers, 1)
    mover.store(memory, [BlockCopy(1, slot=0, generation=1)])
    kernels = Kernels(device, graphs=False)
    for layer in layers:
        kernels.run(50)
        layer[5].fill_(7.0)
    mover.mark()
    back = [BlockCopy(5, slot=0, generation=1)]
    known = mover.load(memory, back) == back
    kernels.finish()
    equal = known and all(torch.equal(layer[5], one) for layer, one in zip(layers, wanted, strict=True))
    memory.close()
    return {"equal": equal}


def kernels_beside_copies(shape: MadeShape) -> Figures:
    """How much longer kernels take while blocks go to the host."""
    layers = list(shape.made(True).values())
    mover, memory = CudaMover(layers, cuda_of(layers[0])), memory_for(layers, shape.blocks)
    copies = [BlockCopy(block, slot=block, generation=1) for block in range(min(mover.at_once, shape.blocks))]
    mover.store(memory, copies)  # what is registered at its first use
    kernels, over = Kernels(shape.device, graphs=False), threading.Event()

    def taken() -> float:
        began = time.perf_counter()
        kernels.run(100)
        kernels.finish()
        return time.perf_counter() - began

    def copy() -> None:
        while not over.is_set():
            mover.store(memory, copies)

    alone = statistics.median(taken() for _ in range(ROUNDS))
    with ThreadPoolExecutor(1) as copier:
        copying = copier.submit(copy)
        beside = statistics.median(taken() for _ in range(ROUNDS))
        over.set()
        copying.result()
    memory.close()
    return {"beside_copies_vs_alone": beside / alone}


class Kernels:
    """A layer's work: as kernels, or as a graph piece, as vLLM replays them between the connector's hooks."""

    def __init__(self, device: str, graphs: bool) -> None:
        self._cuda = device == "cuda"
        self._one = torch.randn(*(2 * (2048 if self._cuda else 128,)), device=device)
        self._out = torch.empty_like(self._one)
        self._graph: Any = None
        self.run(1)
        self.finish()
        if graphs and self._cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._work()
            self._graph = graph

    def _work(self) -> None:
        torch.mm(self._one, self._one, out=self._out)

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self._graph.replay() if self._graph is not None else self._work()

    def finish(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def safepoints(device: str) -> Figures:
    """Iterations of layers of kernels: as they are, armed, and left when the flag is raised."""
    kernels = Kernels(device, graphs=True)
    with ExitStack() as stack:
        flag = Flag(f"conserve-gpu-{os.getpid()}")
        stack.callback(flag.remove)
        worker = SafepointWorker(flag, 1, 0, 1, RUN_AHEAD)
        names = [f"layer{n}" for n in range(LAYERS)]
        worker.register({name: torch.empty(1, device=device) for name in names})

        def iteration(epoch: int, raised_in: int = -1) -> tuple[float, float]:
            """Seconds until the device is done, and from the flag to there."""
            worker.before_step(Armed(epoch) if epoch else None)
            began, raised = time.perf_counter(), 0.0
            try:
                for index, name in enumerate(names):
                    if index == raised_in:
                        raised = time.perf_counter()
                        flag.raise_for(epoch)
                    worker.before_layer(name)
                    kernels.run()
                    worker.after_layer(name)
            except SafepointAbort:
                pass
            kernels.finish()
            worker.after_step()
            ended = time.perf_counter()
            return ended - began, ended - raised

        plain = statistics.median(iteration(0)[0] for _ in range(ROUNDS))
        armed = statistics.median(iteration(epoch)[0] for epoch in range(1, ROUNDS + 1))
        left = statistics.median(iteration(100 + n, LAYERS // 2)[1] for n in range(ROUNDS))
    return {
        "iteration_s": plain,
        "armed_vs_plain": armed / plain,
        "signal_to_idle_layers": left / (plain / LAYERS),
    }


def pages_that_change_their_use(device: str) -> Figures:
    """Half of some layers gives way to KV of the other half, and comes back under a graph that was captured
    before. Bandwidths are of what is dropped; restoring stands beside one plain copy."""
    on_gpu, row = device == "cuda", 1 << 14
    driver = CudaDriver(torch.device(device)) if on_gpu else MemfdDriver()
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
        driver.wait()
        began = time.perf_counter()
        what()
        driver.wait()
        return time.perf_counter() - began

    def drop() -> None:
        weights.drop(gone)
        kv.set_aside(gone, [])
        kv.forget_aside()

    drop_s, grow_s = taken(drop), taken(lambda: kv.resize(kept, 3 * blocks))
    new_is_zero = not kv.read(1, new).any()
    kv.write(1, new, torch.full((len(new), row), 9.0, device=device))
    shrink_s, restore_s = taken(lambda: kv.resize(kept, blocks)), taken(lambda: weights.restore(gone))
    kv.put_back(blocks)
    host, plain = driver.host(size), torch.empty(size, dtype=torch.uint8, device=device)
    plain_s = min(taken(lambda: plain.copy_(host, non_blocking=True)) for _ in range(3))
    equal = new_is_zero and bool((kv.read(1, old) == 1).all()) and torch.equal(passes.run(), before)
    return {
        "page_bytes": driver.page_bytes,
        "equal": equal,
        "drop_gbs": size / drop_s / 1e9,
        "grow_gbs": 2 * size / grow_s / 1e9,  # what was parameters and what was their KV
        "shrink_gbs": 2 * size / shrink_s / 1e9,
        "restore_gbs": size / restore_s / 1e9,
        "restore_vs_plain_copy": plain_s / restore_s,
    }


class LayerPasses:
    """One behind the other: as they are, or as a graph that was captured once."""

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
