"""Measures copies of KV without an engine, in the sizes of a current model. Differing bytes are an error.

KV is copied to the host and back, beside a plain copy of the same blocks. KV is sent over a connection within
one process, in place and through a staging window. Last, KV is sent from one process to another, beside a
plain copy over a socket.
"""

import secrets
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from benchmarks.harness.kv_transfer import BLOCK_TOKENS, LIMIT_S, Producer, fetch_prompt, transfer_end
from benchmarks.harness.processes import HOST, received, spawned
from kvtransfer.checkpoint.copier import Copier, lower_thread_priority
from kvtransfer.checkpoint.copy_orders import BlockCopy, BlockLoad, CheckpointOrder
from kvtransfer.checkpoint.cuda_mover import memory_for, mover_for
from kvtransfer.checkpoint.host_slots import block_bytes
from kvtransfer.transfer.kv_memory import BlockMemory, HostBlockMemory
from kvtransfer.transfer.staging import StagedBlockMemory

Kv = dict[str, torch.Tensor]
GB = 1e9
SOCKET_BYTES = 4 << 20  # bytes of each call of the plain copy
HEADS, CHANNELS = 8, 256  # of keys and values in 16 bit: a block of a layer is 64 KiB
WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class KvSize:
    """Number of layers and blocks of the copied KV, and how often each copy is repeated."""

    layers: int = 32
    blocks: int = 128
    rounds: int = 5

    @property
    def all_blocks(self) -> list[int]:
        return list(range(self.blocks))

    def make(self, random: bool) -> Kv:
        shape = (self.blocks, HEADS, BLOCK_TOKENS, CHANNELS)
        fill = torch.randn if random else torch.zeros
        return {f"layer{n}": fill(shape, dtype=torch.bfloat16) for n in range(self.layers)}


def measure_copies(size: KvSize) -> dict[str, float]:
    return {**host_copies(size), **transfers(size), **between_processes(size)}


def host_copies(size: KvSize) -> dict[str, float]:
    """Measure the host tier's copier, with digests, beside a plain copy of the same blocks.

    The plain copy runs in one thread with the copier's priority, one call for each block of a layer.
    `one_call` copies all bytes in a single call.
    """
    layers = list(size.make(True).values())
    wanted = [layer.clone() for layer in layers]
    copier = Copier(memory_for(layers, size.blocks), mover_for(layers))
    order = torch.randperm(size.blocks).tolist()
    copies = [BlockCopy(block, slot, 1) for slot, block in enumerate(order)]
    rows = [layer.view(torch.uint8).view(len(layer), -1).numpy() for layer in layers]
    host = [row.copy() for row in rows]
    everything = torch.cat([layer.view(-1) for layer in layers]).view(torch.uint8).numpy()
    elsewhere = everything.copy()

    def copy_blocks() -> None:
        for slot, block in enumerate(order):
            for there, here in zip(host, rows, strict=True):
                there[slot] = here[block]

    def copy_once() -> None:
        elsewhere[:] = everything

    def store() -> None:
        copier.submit(CheckpointOrder(stores=copies))
        left, limit = len(copies), time.monotonic() + LIMIT_S
        while left > 0:
            left -= sum(copier.take_report().stored.values())
            _pause(limit)

    def restore() -> None:
        copier.submit(CheckpointOrder(loads=[BlockLoad("r", copies)]))
        limit = time.monotonic() + LIMIT_S
        while not copier.take_ended().requests:
            _pause(limit)

    plain = {"plain_store": copy_blocks, "plain_restore": copy_blocks, "one_call": copy_once}
    taken: dict[str, list[float]] = {name: [] for name in (*plain, "store", "restore")}
    thread = ThreadPoolExecutor(1, initializer=lower_thread_priority)
    try:
        for _ in range(size.rounds + 1):  # the first round touches every page
            for name, copy in plain.items():
                taken[name].append(thread.submit(seconds_of, copy).result())
            taken["store"].append(seconds_of(store))
            for layer in layers:
                layer.zero_()
            taken["restore"].append(seconds_of(restore))
            if not all(torch.equal(one, other) for one, other in zip(layers, wanted, strict=True)):
                raise AssertionError("KV did not come back from the host as it was")
    finally:
        copier.close()
    ratios = [  # within one round, because the machine drifts between rounds
        statistics.median(plain / ours for plain, ours in zip(taken[f"plain_{way}"], taken[way], strict=True))
        for way in ("store", "restore")
    ]
    total = size.blocks * block_bytes(layers)
    gbs = {f"host_{name}_gbs": total / min(seconds[1:]) / GB for name, seconds in taken.items()}
    return {**gbs, "host_copy_vs_memcpy": min(ratios)}


def _pause(limit: float) -> None:
    if time.monotonic() > limit:
        raise TimeoutError(f"a copy of KV did not end in {LIMIT_S:g} s")
    time.sleep(0.0002)


def transfers(size: KvSize) -> dict[str, float]:
    """Measure how fast a prompt crosses a connection in this process: in place, encrypted and staged."""
    theirs, mine = size.make(True), size.make(False)
    staged = [StagedBlockMemory(kv, size.blocks, WINDOW_BYTES, None) for kv in (theirs, mine)]
    direct = [HostBlockMemory(kv, size.blocks) for kv in (theirs, mine)]
    ways: dict[str, tuple[list[BlockMemory], bool]] = {
        "direct": ([*direct], False),
        "encrypted": ([*direct], True),
        "staged": ([*staged], False),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(size.rounds):
        for way, ((source, target), encrypted) in ways.items():
            end, producer = transfer_end(secrets.token_bytes(16), encrypted), Producer(source, size.layers)
            port, (name,) = producer.serve(end), producer.offer([size.all_blocks])
            began = time.perf_counter()
            fetch_prompt(port, name, size.all_blocks, target, end)
            seconds[way].append(time.perf_counter() - began)
    for memory in staged:
        memory.close()
    if not all(torch.equal(mine[name], layer) for name, layer in theirs.items()):
        raise AssertionError("KV did not arrive as it was sent")
    total = sum(layer.nbytes for layer in theirs.values())
    gbs = {name: total / min(taken) / GB for name, taken in seconds.items()}
    return {
        "transfer_direct_gbs": gbs["direct"],
        "transfer_staged_gbs": gbs["staged"],
        "staged_transfer_vs_direct": gbs["staged"] / gbs["direct"],
        "transfer_encrypted_gbs": gbs["encrypted"],
        "encrypted_transfer_vs_direct": gbs["encrypted"] / gbs["direct"],
    }


def between_processes(size: KvSize) -> dict[str, float]:
    """Measure how fast one prompt moves between two processes, compared with a plain copy over a socket."""
    kv, secret = size.make(False), secrets.token_bytes(16)
    total = sum(layer.nbytes for layer in kv.values())
    memory = HostBlockMemory(kv, size.blocks)
    for layer in kv.values():
        layer.fill_(1)  # touches every page
    taken: dict[str, list[float]] = {"clear": [], "encrypted": [], "plain": []}
    with spawned(_produce, size, secret) as pipe:
        ports = received(pipe)
        for _ in range(size.rounds):
            for way in ("clear", "encrypted"):
                pipe.send(way)
                end, name = transfer_end(secret, way == "encrypted"), received(pipe)
                began = time.perf_counter()
                fetch_prompt(ports[way], name, size.all_blocks, memory, end)
                taken[way].append(time.perf_counter() - began)
            pipe.send("plain")
            taken["plain"].append(_plain_s(ports["plain"], total))
    gbs = {way: total / min(seconds) / GB for way, seconds in taken.items()}
    return {
        "processes_transfer_gbs": gbs["clear"],
        "processes_encrypted_gbs": gbs["encrypted"],
        "processes_plain_socket_gbs": gbs["plain"],
        "processes_transfer_vs_plain_socket": gbs["clear"] / gbs["plain"],
    }


def _plain_s(port: int, total: int) -> float:
    into = memoryview(bytearray(b"x") * SOCKET_BYTES)
    with socket.create_connection((HOST, port)) as peer:
        began, left = time.perf_counter(), total
        while left:
            got = peer.recv_into(into[: min(left, SOCKET_BYTES)], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the producer ended")
            left -= got
        return time.perf_counter() - began


def _produce(pipe: Connection, size: KvSize, secret: bytes) -> None:
    """Send prompts and plain copies to the other process, as that asks for them through the pipe."""
    kv = size.make(True)
    total = sum(layer.nbytes for layer in kv.values())
    producer, listener = (
        Producer(HostBlockMemory(kv, size.blocks), size.layers),
        socket.create_server((HOST, 0)),
    )
    ports = {way: producer.serve(transfer_end(secret, way == "encrypted")) for way in ("clear", "encrypted")}
    pipe.send(ports | {"plain": listener.getsockname()[1]})
    while True:
        try:
            way = pipe.recv()
        except EOFError:
            return
        if way != "plain":
            pipe.send(producer.offer([size.all_blocks])[0])
            continue
        peer, _ = listener.accept()
        with peer:
            source, left = memoryview(bytearray(b"x") * SOCKET_BYTES), total
            while left:
                left -= peer.send(source[: min(left, SOCKET_BYTES)])


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
