"""KV from one process to another on one GPU: staged TCP as the product has it, and CUDA IPC.

With IPC the consumer maps the producer's one buffer and copies from device to device: all of it, or blocks by
a batch memcpy. On a CPU the buffer is shared host memory.
"""

import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import multiprocessing

from benchmarks.gpu.batch_memcpy import AT_ANY_TIME, BatchMemcpyError, batch_memcpy, pointers
from benchmarks.gpu.figures import Figures, bandwidth
from benchmarks.gpu.host_tier_copies import BlockShape, finish, made_blocks
from kvtransfer.side_stream import cuda_of
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferServer, TransferSource, fetch
from kvtransfer.transfer.staging import StagedBlockMemory

WINDOW_BYTES = 256 << 20
BLOCK_TOKENS = 16
LIMIT_S = 30.0
IPC = "ipc"  # asks the producer for its buffer; a number asks for so many prompts


def between_processes(device: str) -> Figures:
    on_gpu = device == "cuda"
    shape = BlockShape(36, 256, 64 << 10, 3) if on_gpu else BlockShape(4, 16, 4 << 10, 1)
    window = WINDOW_BYTES if on_gpu else 64 << 10
    secret, context = secrets.token_bytes(16), multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    producer = context.Process(target=_produce, args=(theirs, device, shape, window, secret), daemon=True)
    producer.start()
    theirs.close()
    try:
        mine = torch.zeros(shape.layers, shape.blocks, shape.piece_bytes, dtype=torch.uint8, device=device)
        wanted = _made(device, shape)
        end, port = TransferEnd(1, 0, 1, LIMIT_S, secret), _received(ours)
        found = _over_tcp(device, shape, window, ours, end, port, mine, wanted)
        try:
            found |= _over_ipc(device, shape, ours, mine, wanted)
        except Exception as error:  # noqa: BLE001  a container may forbid it; what TCP showed stays
            found["ipc_failed"] = f"{type(error).__name__}: {error}"
        found["equal"] = all(value for name, value in found.items() if name.endswith("_equal"))
        return found
    finally:
        ours.close()
        producer.join(5)
        if producer.is_alive():
            producer.kill()
            producer.join()


def _over_tcp(
    device: str,
    shape: BlockShape,
    window: int,
    told: Connection,
    end: TransferEnd,
    port: int,
    mine: torch.Tensor,
    wanted: torch.Tensor,
) -> Figures:
    layers = {f"layer{n}": layer for n, layer in enumerate(mine.unbind())}
    memory, found = StagedBlockMemory(layers, shape.blocks, window, cuda_of(mine)), Figures()
    for prompts in (1, 8):
        taken, equal, each = [], True, shape.blocks // prompts
        for _ in range(shape.rounds + 1):
            mine.zero_()
            finish(device)
            told.send(prompts)
            names = _received(told)
            with ThreadPoolExecutor(prompts) as threads:
                began = time.perf_counter()
                fetched = [
                    threads.submit(
                        fetch,
                        TransferSource("127.0.0.1", port, name, 1, "p"),
                        [0],
                        [list(range(number * each, (number + 1) * each))],
                        memory,
                        end,
                        Cancellation(),
                    )
                    for number, name in enumerate(names)
                ]
                for one in fetched:
                    one.result(LIMIT_S)
                taken.append(time.perf_counter() - began)
            finish(device)
            equal &= torch.equal(mine, wanted)
        found |= bandwidth(f"staged_tcp_{prompts}_prompts", shape.nbytes, taken[1:])
        found[f"staged_tcp_{prompts}_prompts_equal"] = equal
    memory.close()
    return found


def _over_ipc(
    device: str, shape: BlockShape, told: Connection, mine: torch.Tensor, wanted: torch.Tensor
) -> Figures:
    told.send(IPC)
    began = time.perf_counter()
    buffer = _received(told)
    found: Figures = {"ipc_first_open_ms": (time.perf_counter() - began) * 1e3}
    order = torch.randperm(shape.blocks).tolist()
    by_block = (shape.blocks, 1, shape.layers * shape.piece_bytes)
    layouts = {
        "LB": (mine.transpose(0, 1), buffer.transpose(0, 1)),
        "BL": (mine.view(by_block), buffer.view(by_block)),
    }
    _ipc_way("ipc_plain_copy", lambda: mine.copy_(buffer), device, shape, mine, wanted, found)
    try:
        batch = batch_memcpy(device)
        for layout, (to, source) in layouts.items():

            def copy(to: torch.Tensor = to, source: torch.Tensor = source) -> None:
                batch.copy(pointers(to, order), pointers(source, order), to.shape[2], AT_ANY_TIME)

            _ipc_way(f"ipc_batch_{layout}", copy, device, shape, mine, wanted, found)
    except BatchMemcpyError as error:
        found["ipc_batch_failed"] = str(error)
    return found


def _ipc_way(
    name: str,
    copy: Callable[[], object],
    device: str,
    shape: BlockShape,
    mine: torch.Tensor,
    wanted: torch.Tensor,
    found: Figures,
) -> None:
    taken, equal = [], True
    for _ in range(shape.rounds + 3):
        mine.zero_()
        finish(device)
        began = time.perf_counter()
        copy()
        finish(device)
        taken.append(time.perf_counter() - began)
        equal &= torch.equal(mine, wanted)
    found |= bandwidth(name, shape.nbytes, taken[1:])
    found[f"{name}_equal"] = equal


def _made(device: str, shape: BlockShape) -> torch.Tensor:
    """Return the same bytes in both processes."""
    torch.manual_seed(0)
    blocks = made_blocks(device, shape.layers, shape.blocks, shape.piece_bytes)
    finish(device)
    return blocks


def _received(told: Connection) -> Any:
    if not told.poll(LIMIT_S):
        raise TimeoutError(f"the producing process says nothing for {LIMIT_S:g} s")
    return told.recv()


def _produce(told: Connection, device: str, shape: BlockShape, window: int, secret: bytes) -> None:
    """Serve the KV of one buffer until the pipe is closed."""
    buffer = _made(device, shape).share_memory_()
    layers = {f"layer{n}": layer for n, layer in enumerate(buffer.unbind())}
    memory = StagedBlockMemory(layers, shape.blocks, window, cuda_of(buffer))
    exports = Exports(memory, BLOCK_TOKENS, LIMIT_S, time.monotonic)
    listener = socket.create_server(("127.0.0.1", 0))
    TransferServer(listener, TransferEnd(1, 0, 1, LIMIT_S, secret), exports)
    told.send(listener.getsockname()[1])
    asked = 0
    while True:
        try:
            prompts = told.recv()
        except EOFError:
            return
        if prompts == IPC:
            told.send(buffer)
            continue
        asked += 1
        each = shape.blocks // prompts
        tokens, names = each * BLOCK_TOKENS, [f"t{asked}-{number}" for number in range(prompts)]
        for number, name in enumerate(names):
            exports.open(name, [list(range(number * each, (number + 1) * each))], tokens, "p")
        exports.begin_step([(name, tokens) for name in names])
        for layer in range(shape.layers):
            exports.after_layer(layer)
        told.send(names)
