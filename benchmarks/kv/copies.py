"""KV copied without an engine, of the shape of a model of today: equal bytes, or an error.

To the host and back beside a plain copy of the same blocks, and from one memory to another over a connection,
staged and in place.
"""

import secrets
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvtransfer.checkpoint.cuda_mover import memory_for, mover_for
from kvtransfer.checkpoint.host_memory import block_bytes
from kvtransfer.checkpoint.scheduler import BlockCopy, BlockLoad, CheckpointOrder
from kvtransfer.checkpoint.worker import Copier, come_after_the_model
from kvtransfer.side_stream import cuda_of
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.memory import BlockMemory, HostBlockMemory
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferServer, TransferSource, fetch
from kvtransfer.transfer.staging import StagedBlockMemory

Kv = dict[str, torch.Tensor]
GB = 1e9
LIMIT_S = 60.0


@dataclass(frozen=True)
class MadeShape:
    """A block of a layer is 64 KiB: 16 tokens, 8 KV heads of 128 in 16 bit."""

    layers: int = 32
    blocks: int = 128
    block_tokens: int = 16
    heads: int = 8
    channels: int = 256  # keys and values
    rounds: int = 5
    window_bytes: int = 32 << 20
    device: str = "cpu"

    def made(self, filled: bool) -> Kv:
        shape = (self.blocks, self.heads, self.block_tokens, self.channels)
        made = torch.randn if filled else torch.zeros
        return {
            f"layer{n}": made(shape, dtype=torch.bfloat16, device=self.device) for n in range(self.layers)
        }


def measure_copies(shape: MadeShape) -> dict[str, float]:
    return {**host_copies(shape), **transfers(shape)}


def host_copies(shape: MadeShape) -> dict[str, float]:
    """The host tier's copier, with digests, beside a copy of the same blocks that does nothing else.

    On the CPU that is one thread, which comes after others as the copier's do, and a block of a layer a call;
    on a GPU it is one call for everything, to or from pinned memory.
    """
    kv = shape.made(True)
    device = list(kv.values())
    wanted = [layer.clone() for layer in device]
    copier = Copier(memory_for(device, shape.blocks), mover_for(device))
    order = torch.randperm(shape.blocks).tolist()
    copies = [BlockCopy(block, slot, 1) for slot, block in enumerate(order)]
    plain = _plain_copies(device, order)
    alike = None if device[0].is_cuda else come_after_the_model
    plainly = ThreadPoolExecutor(1, initializer=alike)
    try:
        taken: dict[str, list[float]] = {}
        for _ in range(shape.rounds + 1):  # the first touches every page
            for name, copy in plain.items():
                taken.setdefault(name, []).append(plainly.submit(_seconds, copy).result())
            taken.setdefault("store", []).append(_seconds(lambda: _store(copier, copies)))
            for layer in device:
                layer.zero_()
            taken.setdefault("restore", []).append(_seconds(lambda: _restore(copier, copies)))
            if not all(torch.equal(one, other) for one, other in zip(device, wanted, strict=True)):
                raise AssertionError("KV did not come back from the host as it was")
    finally:
        copier.close()
    size = shape.blocks * block_bytes(device)
    gbs = {f"host_{name}_gbs": size / min(seconds[1:]) / GB for name, seconds in taken.items()}
    ratios = [
        statistics.median(plain / ours for plain, ours in zip(taken[f"plain_{way}"], taken[way], strict=True))
        for way in ("store", "restore")
    ]  # of one round: neighbours in time have the same machine
    return {**gbs, "host_copy_vs_memcpy": min(ratios)}


def _plain_copies(device: list[torch.Tensor], order: list[int]) -> dict[str, Callable[[], None]]:
    if device[0].is_cuda:
        together = torch.stack([layer.view(-1) for layer in device])
        pinned = torch.empty_like(together, device="cpu", pin_memory=True)

        def down() -> None:
            pinned.copy_(together, non_blocking=True)
            torch.cuda.synchronize()

        def up() -> None:
            together.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        return {"plain_store": down, "plain_restore": up}
    rows = [layer.view(torch.uint8).view(len(layer), -1).numpy() for layer in device]
    host = [row.copy() for row in rows]

    def copy() -> None:
        for slot, block in enumerate(order):
            for there, here in zip(host, rows, strict=True):
                there[slot] = here[block]

    everything = torch.cat([layer.view(-1) for layer in device]).view(torch.uint8).numpy()
    elsewhere = everything.copy()
    return {
        "plain_store": copy,
        "plain_restore": copy,
        "one_call": lambda: elsewhere.__setitem__(slice(None), everything),
    }


def _store(copier: Copier, copies: list[BlockCopy]) -> None:
    copier.submit(CheckpointOrder(stores=copies))
    stored: list[int] = []

    def done() -> bool:
        stored.append(sum(copier.take_report().stored.values()))
        return sum(stored) >= len(copies)

    _until(done)


def _restore(copier: Copier, copies: list[BlockCopy]) -> None:
    copier.submit(CheckpointOrder(loads=[BlockLoad("r", copies)]))
    _until(lambda: bool(copier.take_ended().requests))


def transfers(shape: MadeShape, prompts: int = 1) -> dict[str, float]:
    """One prompt over a connection of this machine, computed before it is asked for; on a GPU, `direct` and
    `encrypted` are between host memories."""
    theirs, mine = shape.made(True), shape.made(False)
    on_host = [{name: layer.cpu() for name, layer in kv.items()} for kv in (theirs, mine)]
    cuda = cuda_of(theirs["layer0"])
    staged = [StagedBlockMemory(kv, shape.blocks, shape.window_bytes, cuda) for kv in (theirs, mine)]
    direct = [HostBlockMemory(kv, shape.blocks) for kv in on_host]
    size = sum(layer.nbytes for layer in theirs.values())
    seconds: dict[str, list[float]] = {"direct": [], "encrypted": [], "staged": []}
    for _ in range(shape.rounds):
        seconds["direct"].append(transfer_s(direct[0], direct[1], shape, prompts))
        seconds["encrypted"].append(transfer_s(direct[0], direct[1], shape, prompts, encrypt=True))
        seconds["staged"].append(transfer_s(staged[0], staged[1], shape, prompts))
    for memory in staged:
        memory.close()
    if not all(torch.equal(mine[name], layer) for name, layer in theirs.items()):
        raise AssertionError("KV did not arrive as it was sent")
    gbs = {name: size / min(taken) / GB for name, taken in seconds.items()}
    return {
        "transfer_direct_gbs": gbs["direct"],
        "transfer_staged_gbs": gbs["staged"],
        "staged_transfer_vs_direct": gbs["staged"] / gbs["direct"],
        "transfer_encrypted_gbs": gbs["encrypted"],
        "encrypted_transfer_vs_direct": gbs["encrypted"] / gbs["direct"],
    }


def transfer_s(
    producer: BlockMemory, consumer: BlockMemory, shape: MadeShape, prompts: int, *, encrypt: bool = False
) -> float:
    """Of all blocks, as so many prompts at once."""
    exports = Exports(producer, shape.block_tokens, LIMIT_S, time.monotonic)
    end = TransferEnd(1, 0, 1, LIMIT_S, secrets.token_bytes(16), encrypt)
    listener = socket.create_server(("127.0.0.1", 0))
    TransferServer(listener, end, exports)
    port = int(listener.getsockname()[1])
    each = shape.blocks // prompts
    tokens = each * shape.block_tokens
    for number in range(prompts):
        exports.open(f"t{number}", [list(range(number * each, (number + 1) * each))], tokens, "p")
    exports.begin_step([(f"t{number}", tokens) for number in range(prompts)])
    for layer in range(len(producer.layers)):
        exports.after_layer(layer)
    with ThreadPoolExecutor(prompts) as threads:
        began = time.perf_counter()
        fetched = [
            threads.submit(
                fetch, TransferSource("127.0.0.1", port, f"t{number}", 1, "p"), [0],
                [list(range(number * each, (number + 1) * each))], consumer, end, Cancellation(),
            )
            for number in range(prompts)
        ]  # fmt: skip
        for one in fetched:
            one.result(LIMIT_S)
        taken = time.perf_counter() - began
    listener.close()
    return taken


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > limit:
            raise TimeoutError(f"a copy of KV did not end in {LIMIT_S:g} s")
        time.sleep(0.0002)
