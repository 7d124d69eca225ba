"""Offers and fetches KV between two memories, without engines."""

import socket
import time

from benchmarks.harness.processes import HOST
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.kv_memory import BlockMemory
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferServer, TransferSource, fetch

BLOCK_TOKENS = 16
LIMIT_S = 60.0


def transfer_end(secret: bytes, encrypted: bool = False) -> TransferEnd:
    return TransferEnd(1, 0, 1, LIMIT_S, secret, encrypted)


class Producer:
    """Offers blocks of one memory for transfer, as prompts that are completely computed."""

    def __init__(self, memory: BlockMemory, layers: int) -> None:
        self._exports = Exports(memory, BLOCK_TOKENS, LIMIT_S, time.monotonic)
        self._layers = layers
        self._offered = 0

    def serve(self, end: TransferEnd) -> int:
        """Begin to serve consumers; return the port to which they connect."""
        listener = socket.create_server((HOST, 0))
        TransferServer(listener, end, self._exports)
        return int(listener.getsockname()[1])

    def offer(self, prompts: list[list[int]]) -> list[str]:
        """Offer prompts, each given by its block numbers; return their transfer ids."""
        names = [f"t{self._offered + number}" for number in range(len(prompts))]
        self._offered += len(prompts)
        sizes = [len(blocks) * BLOCK_TOKENS for blocks in prompts]
        for name, blocks, tokens in zip(names, prompts, sizes, strict=True):
            self._exports.open(name, [blocks], tokens, "p")
        self._exports.begin_step(list(zip(names, sizes, strict=True)))
        for layer in range(self._layers):
            self._exports.after_layer(layer)
        return names


def fetch_prompt(port: int, name: str, blocks: list[int], memory: BlockMemory, end: TransferEnd) -> None:
    fetch(TransferSource(HOST, port, name, 1, "p"), [0], [blocks], memory, end, Cancellation())
