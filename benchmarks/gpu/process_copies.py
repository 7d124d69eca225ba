"""KV transfer between two processes on one GPU: staged TCP, as in the product, and CUDA IPC.

With IPC the consumer maps the producer's one buffer and copies from device to device: all of it, or blocks by
a batch memcpy. On a CPU the buffer is shared host memory.
"""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing  # pipes send tensors as handles of their memory

from benchmarks.gpu.batch_memcpy import AT_ANY_TIME, BatchMemcpyError, batch_memcpy, pointers
from benchmarks.gpu.host_tier_copies import BlockShape, finish, made_blocks
from benchmarks.gpu.results import Figures, bandwidth
from benchmarks.harness.kv_transfer import LIMIT_S, Producer, fetch_prompt, transfer_end
from benchmarks.harness.processes import received, spawned
from kvtransfer.side_stream import cuda_of
from kvtransfer.transfer.staging import StagedBlockMemory

IPC = "ipc"  # asks the producer for its buffer; a number asks for so many prompts


def between_processes(device: str) -> Figures:
    on_gpu = device == "cuda"
    shape = BlockShape(36, 256, 64 << 10, 3) if on_gpu else BlockShape(4, 16, 4 << 10, 1)
    window, secret = 256 << 20 if on_gpu else 64 << 10, secrets.token_bytes(16)
    mine = torch.zeros(shape.layers, shape.blocks, shape.piece_bytes, dtype=torch.uint8, device=device)
    with spawned(_produce, device, shape, window, secret) as pipe:
        consumer = Consumer(device, shape, mine, _made(device, shape), pipe)
        found = consumer.over_tcp(window, secret, received(pipe))
        try:
            found |= consumer.over_ipc()
        except Exception as error:  # noqa: BLE001  a container may forbid it; what TCP showed stays
            found["ipc_failed"] = f"{type(error).__name__}: {error}"
    found["equal"] = all(value for name, value in found.items() if name.endswith("_equal"))
    return found


@dataclass
class Consumer:
    """Copies the producer's KV into `mine` repeatedly, and compares it with `wanted`."""

    device: str
    shape: BlockShape
    mine: torch.Tensor
    wanted: torch.Tensor
    pipe: Connection

    def over_tcp(self, window: int, secret: bytes, port: int) -> Figures:
        layers = {f"layer{n}": layer for n, layer in enumerate(self.mine.unbind())}
        memory = StagedBlockMemory(layers, self.shape.blocks, window, cuda_of(self.mine))
        end, found = transfer_end(secret), Figures()
        for count in (1, 8):
            with ThreadPoolExecutor(count) as threads:
                prompts = _prompts(self.shape, count)

                def fetch_all(names: list[str]) -> None:
                    fetched = [
                        threads.submit(fetch_prompt, port, name, blocks, memory, end)
                        for name, blocks in zip(names, prompts, strict=True)  # noqa: B023
                    ]
                    for one in fetched:
                        one.result(LIMIT_S)

                name, rounds = f"staged_tcp_{count}_prompts", self.shape.rounds + 1
                found |= self._measured(name, fetch_all, rounds, asked=count)
        memory.close()
        return found

    def over_ipc(self) -> Figures:
        self.pipe.send(IPC)
        began = time.perf_counter()
        buffer = received(self.pipe)
        found: Figures = {"ipc_first_open_ms": (time.perf_counter() - began) * 1e3}
        rounds, order = self.shape.rounds + 3, torch.randperm(self.shape.blocks).tolist()
        found |= self._measured("ipc_plain_copy", lambda _: self.mine.copy_(buffer), rounds)
        by_block = (self.shape.blocks, 1, self.shape.layers * self.shape.piece_bytes)
        layouts = {
            "LB": (self.mine.transpose(0, 1), buffer.transpose(0, 1)),
            "BL": (self.mine.view(by_block), buffer.view(by_block)),
        }
        try:
            batch = batch_memcpy(self.device)
            for layout, (to, source) in layouts.items():

                def copy(_: object, to: torch.Tensor = to, source: torch.Tensor = source) -> None:
                    batch.copy(pointers(to, order), pointers(source, order), to.shape[2], AT_ANY_TIME)

                found |= self._measured(f"ipc_batch_{layout}", copy, rounds)
        except BatchMemcpyError as error:
            found["ipc_batch_failed"] = str(error)
        return found

    def _measured(
        self, name: str, copy: Callable[[Any], object], rounds: int, asked: int | None = None
    ) -> Figures:
        """Measure a copy. With `asked`, the producer first offers that many prompts, which is not timed."""
        taken, equal = [], True
        for _ in range(rounds):
            self.mine.zero_()
            finish(self.device)
            if asked:
                self.pipe.send(asked)
            names = received(self.pipe) if asked else []
            began = time.perf_counter()
            copy(names)
            finish(self.device)
            taken.append(time.perf_counter() - began)
            equal &= torch.equal(self.mine, self.wanted)
        return {**bandwidth(name, self.shape.nbytes, taken[1:]), f"{name}_equal": equal}


def _prompts(shape: BlockShape, count: int) -> list[list[int]]:
    each = shape.blocks // count
    return [list(range(number * each, (number + 1) * each)) for number in range(count)]


def _made(device: str, shape: BlockShape) -> torch.Tensor:
    """Return a tensor with the same bytes in both processes."""
    torch.manual_seed(0)
    blocks = made_blocks(device, shape.layers, shape.blocks, shape.piece_bytes)
    finish(device)
    return blocks


def _produce(pipe: Connection, device: str, shape: BlockShape, window: int, secret: bytes) -> None:
    """Serve the KV of one buffer until the pipe is closed."""
    buffer = _made(device, shape).share_memory_()
    layers = {f"layer{n}": layer for n, layer in enumerate(buffer.unbind())}
    producer = Producer(StagedBlockMemory(layers, shape.blocks, window, cuda_of(buffer)), shape.layers)
    pipe.send(producer.serve(transfer_end(secret)))
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        pipe.send(buffer if asked == IPC else producer.offer(_prompts(shape, asked)))
