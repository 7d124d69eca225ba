"""Which blocks of a step become readable for decoders, layer by layer."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from kvtransfer.transfer.exports import Exports, Written
from kvtransfer.transfer.memory import BlockMemory

logger = logging.getLogger("conserve.kvtransfer.publisher")


@dataclass(slots=True)
class Publication:
    """One prefill under way."""

    generation: int
    blocks: list[int]
    total_tokens: int
    complete: int = 0  # blocks handed to the memory so far


class Publisher:
    """Told by the worker's thread what a step computes; the memory tells the exports when it is readable."""

    def __init__(self, memory: BlockMemory, exports: Exports, block_tokens: int) -> None:
        self._memory = memory
        self._exports = exports
        self._block_tokens = block_tokens
        self._open: dict[str, Publication] = {}
        self._blocks: list[int] = []
        self._written: list[Written] = []

    def open(self, transfer_id: str, blocks: list[int], total_tokens: int, prompt: str) -> None:
        self.forget(transfer_id)
        generation = self._exports.open(transfer_id, blocks, total_tokens, prompt)
        self._open[transfer_id] = Publication(generation, [], total_tokens)
        self._reserve(transfer_id, blocks)

    def extend(self, transfer_id: str, blocks: list[int]) -> None:
        if transfer_id in self._open:
            self._exports.extend(transfer_id, blocks)
            self._reserve(transfer_id, blocks)

    def void(self, transfer_id: str) -> None:
        self._exports.void(transfer_id)
        self.forget(transfer_id)

    def abort(self, transfer_id: str) -> None:
        self._exports.abort(transfer_id)
        self.forget(transfer_id)

    def forget(self, transfer_id: str) -> None:
        """Its blocks are read no more."""
        if publication := self._open.pop(transfer_id, None):
            self._memory.release(publication.blocks)

    def begin_step(self, progress: Iterable[tuple[str, int]]) -> None:
        """Tokens of each prompt that are computed once this step is."""
        self._blocks, self._written = [], []
        for transfer_id, tokens in progress:
            if publication := self._open.get(transfer_id):
                tokens = min(tokens, publication.total_tokens)
                self._written.append(Written(transfer_id, publication.generation, tokens))
                whole = tokens == publication.total_tokens
                end = -(-tokens // self._block_tokens) if whole else tokens // self._block_tokens
                self._blocks += publication.blocks[publication.complete : end]
                publication.complete = end

    def after_layer(self, layer: int) -> None:
        if self._written:
            self._memory.publish(layer, self._blocks, partial(self._exports.wrote, layer, self._written))

    def _reserve(self, transfer_id: str, blocks: list[int]) -> None:
        if self._memory.reserve(blocks):
            self._open[transfer_id].blocks += blocks
        else:
            logger.warning("no staging memory for transfer %s: its decoder recomputes", transfer_id)
            self.abort(transfer_id)
