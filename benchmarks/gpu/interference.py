"""Cost of copies and registrations for a model that runs at the same time."""

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from benchmarks.gpu.abortable_steps import timed
from benchmarks.gpu.decode_layers import DecodeLayers
from benchmarks.gpu.host_tier_copies import finish, made_blocks, shape_for
from benchmarks.gpu.results import Figures, spread
from kvtransfer.checkpoint.copy_orders import BlockCopy
from kvtransfer.checkpoint.cuda_mover import CudaMover, memory_for
from kvtransfer.checkpoint.host_slots import CHUNK_BYTES, CudaRegistrar, PinnedMemoryRegistrar
from kvtransfer.side_stream import cuda_of


def kernels_beside_copies(device: str) -> Figures:
    """Measure decode steps, alone and while another thread stores blocks with the product's mover."""
    rounds, shape = (60 if device == "cuda" else 3), shape_for(device)
    decode = DecodeLayers(device)
    kv = made_blocks(device, shape.layers, shape.blocks, shape.piece_bytes)
    layers = list(kv.unbind())
    mover, memory = CudaMover(layers, cuda_of(kv)), memory_for(layers, shape.blocks)
    copies = [BlockCopy(block, slot=block, generation=1) for block in range(min(mover.at_once, shape.blocks))]
    mover.store(memory, copies)  # registers the memory
    over, stored = threading.Event(), [0]

    def store() -> None:
        while not over.is_set():
            mover.store(memory, copies)
            stored[0] += 1

    def steps() -> dict[str, list[float]]:
        ways = {"whole_graph_step": decode.step_as_whole_graph, "pieces_step": decode.step_in_pieces}
        return {name: [timed(way, decode.finish).step_s for _ in range(rounds)] for name, way in ways.items()}

    steps()
    alone = steps()
    with ThreadPoolExecutor(1) as copier:
        copying = copier.submit(store)
        began = time.perf_counter()
        try:
            beside = steps()
            taken = time.perf_counter() - began
        finally:
            over.set()
        copying.result()
    found = Figures()
    for name in alone:
        found |= spread(f"{name}_alone", alone[name]) | spread(f"{name}_beside_stores", beside[name])
    row_bytes = shape.layers * shape.piece_bytes
    found["stored_beside_gbs"] = stored[0] * len(copies) * row_bytes / taken / 1e9
    here = kv[:, : len(copies)].transpose(0, 1).reshape(len(copies), row_bytes)
    found["equal"] = torch.equal(memory.tensor[: len(copies)], here.cpu())
    memory.close()
    return found


Span = tuple[float, float, float]  # when a launch began, when its call returned, when its kernel was done


class NoRegistry(PinnedMemoryRegistrar):
    """Replacement for the GPU's driver on a CPU."""

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> None: ...


def registration(device: str) -> Figures:
    """Measure the registration of host memory, and launches of a small kernel during each part of it."""
    on_gpu = device == "cuda"
    nbytes, rounds, launches = (CHUNK_BYTES, 5, 3000) if on_gpu else (1 << 20, 2, 50)
    chunks = Chunks(CudaRegistrar(torch.device(device)) if on_gpu else NoRegistry(), nbytes, rounds)
    small = torch.zeros(1024, device=device)

    def launch() -> Span:
        began = time.perf_counter()
        small.add_(1)
        called = time.perf_counter()
        finish(device)
        return began, called, time.perf_counter()

    alone = [launch() for _ in range(launches)]
    found = Figures()
    for part, spans in chunks.register().items():
        found |= spread(part, [end - began for began, end in spans])
    beside: list[Span] = []
    with ThreadPoolExecutor(1) as thread:
        registering = thread.submit(chunks.register)
        while not registering.done():
            beside.append(launch())
        parts = registering.result()
    times = {"alone": alone}
    for part, spans in parts.items():
        found |= spread(f"{part}_beside_launches", [end - began for began, end in spans])
        times[f"beside_{part}"] = [
            one for one in beside if any(one[0] < end and began < one[2] for began, end in spans)
        ]
    for name, some in times.items():
        found[f"launches_{name}"] = len(some)
        if some:
            found |= spread(f"launch_{name}", [called - began for began, called, _ in some])
            found |= spread(f"launch_until_done_{name}", [done - began for began, _, done in some])
    found["refused"] = ", ".join(sorted(chunks.refused))
    found["equal"] = not chunks.refused and bool((small == len(alone) + len(beside)).all())
    return found


class Chunks:
    """Maps chunks of host memory, touches, registers and unregisters them, one after another."""

    def __init__(self, registry: PinnedMemoryRegistrar, nbytes: int, rounds: int) -> None:
        self._registry = registry
        self._nbytes = nbytes
        self._rounds = rounds
        self.refused: set[str] = set()

    def register(self) -> dict[str, list[tuple[float, float]]]:
        """Return when each part began and ended."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for _ in range(self._rounds):
            mapped = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = np.frombuffer(mapped, dtype=np.uint8)
            at = [time.perf_counter()]
            memory.fill(0)
            at.append(time.perf_counter())
            error = self._registry.register(memory.ctypes.data, self._nbytes)
            at.append(time.perf_counter())
            if error:
                self.refused.add(error)
            else:
                self._registry.unregister(memory.ctypes.data)
            at.append(time.perf_counter())
            for part, span in zip(("first_touch", "register", "unregister"), pairwise(at), strict=True):
                spans.setdefault(part, []).append(span)
        return spans
