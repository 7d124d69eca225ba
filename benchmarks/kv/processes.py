"""One prompt from a process to another, as between two engines, beside a plain copy over a socket.

Two interpreters, each with its own lock. KV is in host memory, computed before it is asked for; the plain
copy is of as many bytes, over one connection, from and to memory that is in use already.
"""

import multiprocessing
import secrets
import socket
import time
from multiprocessing.connection import Connection

import torch

from benchmarks.kv.copies import GB, LIMIT_S, MadeShape
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.memory import HostBlockMemory
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferServer, TransferSource, fetch

PLAIN_BYTES = 4 << 20  # a call


def between_processes(shape: MadeShape) -> dict[str, float]:
    kv = shape.made(False)
    mine = {name: layer.cpu() for name, layer in kv.items()}
    size = sum(layer.nbytes for layer in mine.values())
    memory = HostBlockMemory(mine, shape.blocks)
    for layer in mine.values():
        layer.fill_(1)  # every page is there
    secret = secrets.token_bytes(16)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    producer = multiprocessing.get_context("spawn").Process(target=_produce, args=(theirs, shape, secret))
    producer.start()
    theirs.close()  # with the producer's end ours has one, too
    try:
        ports = ours.recv()
        taken: dict[str, list[float]] = {"clear": [], "encrypted": [], "plain": []}
        for _ in range(shape.rounds):
            for way in ("clear", "encrypted"):
                ours.send(way)
                name, port = ours.recv(), ports[way]
                end = TransferEnd(1, 0, 1, LIMIT_S, secret, way == "encrypted")
                source = TransferSource("127.0.0.1", port, name, 1, "p")
                began = time.perf_counter()
                fetch(source, [0], [list(range(shape.blocks))], memory, end, Cancellation())
                taken[way].append(time.perf_counter() - began)
            ours.send("plain")
            taken["plain"].append(_plain_s(ports["plain"], size))
    finally:
        ours.close()
        producer.join(LIMIT_S)
    gbs = {way: size / min(seconds) / GB for way, seconds in taken.items()}
    return {
        "processes_transfer_gbs": gbs["clear"],
        "processes_encrypted_gbs": gbs["encrypted"],
        "processes_plain_socket_gbs": gbs["plain"],
        "processes_transfer_vs_plain_socket": gbs["clear"] / gbs["plain"],
    }


def _plain_s(port: int, size: int) -> float:
    into = memoryview(bytearray(b"x") * PLAIN_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        began, left = time.perf_counter(), size
        while left:
            got = peer.recv_into(into[: min(left, PLAIN_BYTES)], 0, socket.MSG_WAITALL)
            if not got:
                raise ConnectionError("the producer ended")
            left -= got
        return time.perf_counter() - began


def _produce(told: Connection, shape: MadeShape, secret: bytes) -> None:
    torch.manual_seed(0)
    kv = {name: layer.cpu() for name, layer in shape.made(True).items()}
    size = sum(layer.nbytes for layer in kv.values())
    exports = Exports(HostBlockMemory(kv, shape.blocks), shape.block_tokens, LIMIT_S, time.monotonic)
    listeners = {way: socket.create_server(("127.0.0.1", 0)) for way in ("clear", "encrypted", "plain")}
    for way in ("clear", "encrypted"):
        TransferServer(listeners[way], TransferEnd(1, 0, 1, LIMIT_S, secret, way == "encrypted"), exports)
    told.send({way: listener.getsockname()[1] for way, listener in listeners.items()})
    tokens = shape.blocks * shape.block_tokens
    number = 0
    while True:
        try:
            way = told.recv()
        except EOFError:
            return
        if way == "plain":
            peer, _ = listeners["plain"].accept()
            with peer:
                source, left = memoryview(bytearray(b"x") * PLAIN_BYTES), size
                while left:
                    left -= peer.send(source[: min(left, PLAIN_BYTES)])
            continue
        number += 1
        exports.open(f"t{number}", [list(range(shape.blocks))], tokens, "p")
        exports.begin_step([(f"t{number}", tokens)])
        for layer in range(len(kv)):
            exports.after_layer(layer)
        told.send(f"t{number}")
