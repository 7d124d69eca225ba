"""Copies of KV without an engine, in the shape of a model of today; bytes that differ are an error.

Copies go to the host and back beside a plain copy of the same blocks, over a connection within one process in
place and through a staging window, and from one process to another beside a plain copy over a socket.
"""

import multiprocessing
import secrets
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from kvtransfer.checkpoint.copier import Copier, come_after_the_model
from kvtransfer.checkpoint.cuda_mover import memory_for, mover_for
from kvtransfer.checkpoint.host_slots import block_bytes
from kvtransfer.checkpoint.scheduler import BlockCopy, BlockLoad, CheckpointOrder
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.kv_memory import BlockMemory, HostBlockMemory
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferServer, TransferSource, fetch
from kvtransfer.transfer.staging import StagedBlockMemory

Kv = dict[str, torch.Tensor]
GB = 1e9
LIMIT_S = 60.0
SOCKET_BYTES = 4 << 20  # of a call of the plain copy
HOST = "127.0.0.1"


@dataclass(frozen=True)
class KvSize:
    """Sizes of the KV; a block of a layer is 64 KiB: 16 tokens, 8 KV heads of 128 in 16 bit."""

    layers: int = 32
    blocks: int = 128
    block_tokens: int = 16
    heads: int = 8
    channels: int = 256  # keys and values
    rounds: int = 5
    window_bytes: int = 32 << 20

    @property
    def all_blocks(self) -> list[int]:
        return list(range(self.blocks))

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    def make(self, random: bool) -> Kv:
        shape = (self.blocks, self.heads, self.block_tokens, self.channels)
        fill = torch.randn if random else torch.zeros
        return {f"layer{n}": fill(shape, dtype=torch.bfloat16) for n in range(self.layers)}


def measure_copies(size: KvSize) -> dict[str, float]:
    return {**host_copies(size), **transfers(size), **between_processes(size)}


def host_copies(size: KvSize) -> dict[str, float]:
    """Measure the host tier's copier, with digests, beside a plain copy of the same blocks.

    The plain copy is one thread of the copier's priority, with a call for each block of a layer; `one_call`
    is a single copy of all bytes.
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

    plain = {"plain_store": copy_blocks, "plain_restore": copy_blocks, "one_call": copy_once}
    taken: dict[str, list[float]] = {name: [] for name in (*plain, "store", "restore")}
    thread = ThreadPoolExecutor(1, initializer=come_after_the_model)
    try:
        for _ in range(size.rounds + 1):  # the first round touches every page
            for name, copy in plain.items():
                taken[name].append(thread.submit(_seconds, copy).result())
            taken["store"].append(_seconds(lambda: _store(copier, copies)))
            for layer in layers:
                layer.zero_()
            taken["restore"].append(_seconds(lambda: _restore(copier, copies)))
            if not all(torch.equal(one, other) for one, other in zip(layers, wanted, strict=True)):
                raise AssertionError("KV did not come back from the host as it was")
    finally:
        copier.close()
    total = size.blocks * block_bytes(layers)
    ratios = [  # within one round, since neighbours in time have the same machine
        statistics.median(plain / ours for plain, ours in zip(taken[f"plain_{way}"], taken[way], strict=True))
        for way in ("store", "restore")
    ]
    gbs = {f"host_{name}_gbs": total / min(seconds[1:]) / GB for name, seconds in taken.items()}
    return {**gbs, "host_copy_vs_memcpy": min(ratios)}


def _store(copier: Copier, copies: list[BlockCopy]) -> None:
    copier.submit(CheckpointOrder(stores=copies))
    left, limit = len(copies), time.monotonic() + LIMIT_S
    while left > 0:
        left -= sum(copier.take_report().stored.values())
        _pause(limit)


def _restore(copier: Copier, copies: list[BlockCopy]) -> None:
    copier.submit(CheckpointOrder(loads=[BlockLoad("r", copies)]))
    limit = time.monotonic() + LIMIT_S
    while not copier.take_ended().requests:
        _pause(limit)


def _pause(limit: float) -> None:
    if time.monotonic() > limit:
        raise TimeoutError(f"a copy of KV did not end in {LIMIT_S:g} s")
    time.sleep(0.0002)


def transfers(size: KvSize) -> dict[str, float]:
    """Measure one prompt over a connection within this process, in place, encrypted and staged."""
    theirs, mine = size.make(True), size.make(False)
    staged = [StagedBlockMemory(kv, size.blocks, size.window_bytes, None) for kv in (theirs, mine)]
    direct = [HostBlockMemory(kv, size.blocks) for kv in (theirs, mine)]
    seconds: dict[str, list[float]] = {"direct": [], "encrypted": [], "staged": []}
    for _ in range(size.rounds):
        seconds["direct"].append(_transfer_s(direct[0], direct[1], size))
        seconds["encrypted"].append(_transfer_s(direct[0], direct[1], size, encrypt=True))
        seconds["staged"].append(_transfer_s(staged[0], staged[1], size))
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


def _transfer_s(
    producer: BlockMemory, consumer: BlockMemory, size: KvSize, *, encrypt: bool = False
) -> float:
    """Return the seconds of fetching a prompt that is computed already."""
    exports = Exports(producer, size.block_tokens, LIMIT_S, time.monotonic)
    end = TransferEnd(1, 0, 1, LIMIT_S, secrets.token_bytes(16), encrypt)
    with socket.create_server((HOST, 0)) as listener:
        TransferServer(listener, end, exports)
        _export(exports, size, "t")
        source = TransferSource(HOST, int(listener.getsockname()[1]), "t", 1, "p")
        return _seconds(lambda: fetch(source, [0], [size.all_blocks], consumer, end, Cancellation()))


def _export(exports: Exports, size: KvSize, name: str) -> None:
    """Offer all blocks as a prompt whose layers are all computed."""
    exports.open(name, [size.all_blocks], size.tokens, "p")
    exports.begin_step([(name, size.tokens)])
    for layer in range(size.layers):
        exports.after_layer(layer)


def between_processes(size: KvSize) -> dict[str, float]:
    """Measure one prompt from a process to another, as between engines, beside a plain copy over a socket."""
    kv = size.make(False)
    total = sum(layer.nbytes for layer in kv.values())
    memory = HostBlockMemory(kv, size.blocks)
    for layer in kv.values():
        layer.fill_(1)  # touches every page
    secret, spawn = secrets.token_bytes(16), multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    producer = spawn.Process(target=_produce, args=(theirs, size, secret))
    producer.start()
    theirs.close()  # so that our end sees the producer's death
    taken: dict[str, list[float]] = {"clear": [], "encrypted": [], "plain": []}
    try:
        ports = ours.recv()
        for _ in range(size.rounds):
            for way in ("clear", "encrypted"):
                ours.send(way)
                end = TransferEnd(1, 0, 1, LIMIT_S, secret, way == "encrypted")
                source = TransferSource(HOST, ports[way], ours.recv(), 1, "p")
                began = time.perf_counter()
                fetch(source, [0], [size.all_blocks], memory, end, Cancellation())
                taken[way].append(time.perf_counter() - began)
            ours.send("plain")
            taken["plain"].append(_plain_s(ports["plain"], total))
    finally:
        ours.close()
        producer.join(LIMIT_S)
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


def _produce(orders: Connection, size: KvSize, secret: bytes) -> None:
    """Serve prompts, and plain copies, as the pipe orders them."""
    kv = size.make(True)
    total = sum(layer.nbytes for layer in kv.values())
    exports = Exports(HostBlockMemory(kv, size.blocks), size.block_tokens, LIMIT_S, time.monotonic)
    listeners = {way: socket.create_server((HOST, 0)) for way in ("clear", "encrypted", "plain")}
    for way in ("clear", "encrypted"):
        TransferServer(listeners[way], TransferEnd(1, 0, 1, LIMIT_S, secret, way == "encrypted"), exports)
    orders.send({way: listener.getsockname()[1] for way, listener in listeners.items()})
    number = 0
    while True:
        try:
            way = orders.recv()
        except EOFError:
            return
        if way == "plain":
            peer, _ = listeners["plain"].accept()
            with peer:
                source, left = memoryview(bytearray(b"x") * SOCKET_BYTES), total
                while left:
                    left -= peer.send(source[: min(left, SOCKET_BYTES)])
        else:
            number += 1
            _export(exports, size, f"t{number}")
            orders.send(f"t{number}")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
