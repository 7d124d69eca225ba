"""Exports of a prefiller: their blocks, how far each layer is written, and when they expire.

An export is opened when its prefill begins, and fills while the prefill runs. When the prefill ends, its
lease begins. When a prefill restarts with new blocks, its export gets a new generation, so that bytes read
under an older generation are never taken for its contents. An ended export leaves a tombstone, so that a late
consumer is refused immediately.
"""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.metrics import Reason
from kvtransfer.transfer.kv_memory import BlockMemory
from kvtransfer.transfer.wire import TransferRefused

MAX_TOMBSTONES = 8192


@dataclass(slots=True)
class Export:
    """Blocks of one prompt that a decoder may fetch."""

    transfer_id: str
    total_tokens: int
    prompt: str
    generation: int
    blocks: list[list[int]]  # by KV cache group
    written: list[int]  # number of tokens by layer whose KV is in the blocks
    deadline: float | None = None  # end of the lease; None while the prefill runs
    ended: Reason | None = None
    delivered: int = 0  # connections whose layers the consumer has


@dataclass(frozen=True, slots=True)
class Written:
    """Number of a prompt's tokens with KV after a step; void once the prefill restarts with new blocks."""

    transfer_id: str
    generation: int
    tokens: int


@dataclass(slots=True)
class Reader:
    """Progress of one connection of a consumer (a *lane*) through an export."""

    export: Export
    skip: Sequence[int]  # leading blocks not to send, by KV cache group
    layers: Sequence[int]  # layers sent over this connection
    lanes: int  # number of the consumer's connections
    generation: int = -1
    sent: list[int] = field(default_factory=list)  # number of blocks sent or skipped, by layer


@dataclass(frozen=True, slots=True)
class Ready:
    """Blocks that can be sent now, as runs: layer, index of the first block, block ids."""

    generation: int
    runs: list[tuple[int, int, list[int]]]
    complete: bool  # nothing remains after these


class Exports:
    """Exports of one rank, written by the worker's thread and read by the server's threads."""

    def __init__(
        self, memory: BlockMemory, block_tokens: int, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self.memory = memory
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._clock = clock
        self._groups = 1 + max(memory.groups)
        self._exports: dict[str, Export] = {}
        self._tombstones: OrderedDict[str, Reason] = OrderedDict()
        self._generations = itertools.count(1)
        self._changed = threading.Condition()
        self.written: list[Written] = []  # by the current step

    def __len__(self) -> int:
        return len(self._exports)

    # The worker's thread

    def open(self, transfer_id: str, blocks: Sequence[list[int]], total_tokens: int, prompt: str) -> int:
        """Open the export of a prefill that begins, or begins again; return the generation of its blocks."""
        with self._changed:
            export = self._exports.get(transfer_id)
            if export is None:
                export = self._exports[transfer_id] = Export(transfer_id, total_tokens, prompt, 0, [], [])
                if self._tombstones.pop(transfer_id, None) is Reason.TAKEN:  # already dismissed
                    export.ended = Reason.TAKEN
            self._restart(export)
            _append(export.blocks, blocks)
            self._changed.notify_all()
            return export.generation

    def extend(self, transfer_id: str, blocks: Sequence[list[int]]) -> None:
        with self._changed:
            if export := self._exports.get(transfer_id):
                _append(export.blocks, blocks)

    def void(self, transfer_id: str) -> None:
        """Forget the blocks of a preempted prefill, which will begin again."""
        with self._changed:
            if export := self._exports.get(transfer_id):
                self._restart(export)

    def begin_step(self, progress: Iterable[tuple[str, int]]) -> None:
        """Record for each export how many tokens of its prompt are computed when this step has ended."""
        self.written = []
        for transfer_id, tokens in progress:
            if export := self._exports.get(transfer_id):
                tokens = min(tokens, export.total_tokens)
                self.written.append(Written(transfer_id, export.generation, tokens))

    def after_layer(self, layer: int) -> None:
        if self.written:
            self.memory.publish(partial(self.wrote, layer, self.written))

    def wrote(self, layer: int, written: Iterable[Written]) -> None:
        """Record that a layer of the prompts in `written` can be read, unless their generation is old."""
        with self._changed:
            for progress in written:
                export = self._exports.get(progress.transfer_id)
                if export is not None and export.generation == progress.generation:
                    export.written[layer] = progress.tokens
            self._changed.notify_all()

    def finish(self, transfer_id: str) -> None:
        """Start the lease of an export whose prefill is over and whose blocks are held."""
        with self._changed:
            if export := self._exports.get(transfer_id):
                export.deadline = self._clock() + self._lease_s

    def abort(self, transfer_id: str) -> None:
        with self._changed:
            if export := self._exports.get(transfer_id):
                self._end(export, Reason.ABORTED)
            else:
                self._bury(transfer_id, Reason.ABORTED)
            self._changed.notify_all()

    def take_released(self) -> list[str]:
        """End finished exports that were delivered or have expired, and return their ids.

        Their blocks may be reused; reads of them are not confirmed any more.
        """
        with self._changed:
            released = []
            for export in list(self._exports.values()):
                self.expire(export)
                if export.ended is not None and export.deadline is not None:
                    self._end(export, export.ended)
                    released.append(export.transfer_id)
            if released:
                self._changed.notify_all()
            return released

    # The server's threads

    def attach(
        self,
        transfer_id: str,
        prompt: str,
        skip: Sequence[int],
        wait_s: float,
        layers: Sequence[int] | None = None,
        lanes: int = 1,
    ) -> Reader:
        """Return a reader for one connection of a consumer. By default it reads all layers.

        Waits at most `wait_s` for the prefill to begin, because the decode leg may arrive first.
        """
        every = range(len(self.memory.layers))
        layers = every if layers is None else layers
        if not set(layers) <= set(every) or len(set(layers)) < len(layers):
            raise TransferRefused(Reason.PROTOCOL, f"layers do not exist or are named twice: {layers}")
        with self._changed:
            self._changed.wait_for(
                lambda: transfer_id in self._exports or transfer_id in self._tombstones, timeout=wait_s
            )
            export = self._exports.get(transfer_id)
            if export is None:
                raise TransferRefused(self._tombstones.get(transfer_id, Reason.UNKNOWN), transfer_id)
            self._check(export)
            if len(skip) != self._groups:
                raise TransferRefused(Reason.LAYOUT, "the engines have different KV cache groups")
            if export.prompt != prompt:
                raise TransferRefused(Reason.PROMPT, "the legs of this transfer have different prompts")
            return Reader(export, skip, layers, lanes)

    def wait_ready(self, reader: Reader, wait_s: float) -> Ready:
        """Wait for blocks that can be sent now, and return them."""
        with self._changed:
            ready: list[Ready] = []

            def progressed() -> bool:
                self._check(reader.export)
                found = self._ready(reader)
                if found.runs or found.complete:
                    ready.append(found)
                return bool(ready)

            if not self._changed.wait_for(progressed, timeout=wait_s):
                raise TransferRefused(Reason.STALLED, "the prefill made no progress")
            return ready[-1]

    def confirm(self, reader: Reader, generation: int) -> bool:
        """Return whether the export still has the blocks of `generation`, so that what was read is valid."""
        with self._changed:
            self._check(reader.export)
            return reader.export.generation == generation

    def renew(self, reader: Reader) -> None:
        """Renew the lease after a frame was sent. The connection's own limit ends a stuck consumer."""
        with self._changed:
            self._check(reader.export)
            if reader.export.deadline is not None:
                reader.export.deadline = self._clock() + self._lease_s

    def delivered(self, reader: Reader) -> None:
        """Record that the consumer has this connection's layers. The last connection delivers the export."""
        with self._changed:
            reader.export.delivered += 1
            if reader.export.delivered >= reader.lanes and reader.export.ended is None:
                reader.export.ended = Reason.TAKEN

    def leave(self, reader: Reader) -> None:
        """End the export of a consumer that left early and will not return."""
        with self._changed:
            if reader.export.ended is None:
                reader.export.ended = Reason.TAKEN
                self._changed.notify_all()

    def dismiss(self, transfer_id: str) -> None:
        """End an export that its consumer does not need."""
        with self._changed:
            export = self._exports.get(transfer_id)
            if export is None:
                self._bury(transfer_id, Reason.TAKEN)
            elif export.ended is None:
                export.ended = Reason.TAKEN

    # Under the lock

    def _restart(self, export: Export) -> None:
        export.blocks = [[] for _ in range(self._groups)]
        export.written = [0] * len(self.memory.layers)
        export.generation = next(self._generations)

    def _end(self, export: Export, reason: Reason) -> None:
        """Remove an export, and remember why it ended so that later consumers are told."""
        export.ended = reason
        del self._exports[export.transfer_id]
        self._bury(export.transfer_id, reason)

    def _ready(self, reader: Reader) -> Ready:
        export = reader.export
        if reader.generation != export.generation:
            reader.generation = export.generation
            reader.sent = [reader.skip[group] for group in self.memory.groups]
        runs = []
        for layer in reader.layers:
            end = self._blocks_of(export, export.written[layer])
            if end > reader.sent[layer]:
                blocks = export.blocks[self.memory.groups[layer]]
                runs.append((layer, reader.sent[layer], blocks[reader.sent[layer] : end]))
                reader.sent[layer] = end
        complete = all(export.written[layer] == export.total_tokens for layer in reader.layers)
        return Ready(export.generation, runs, complete)

    def _blocks_of(self, export: Export, tokens: int) -> int:
        """Return how many blocks `tokens` fill. A partial last block counts once the prompt is complete."""
        if tokens == export.total_tokens:
            return -(-tokens // self._block_tokens)
        return tokens // self._block_tokens

    def _check(self, export: Export) -> None:
        self.expire(export)
        if export.ended is not None:
            raise TransferRefused(export.ended, export.transfer_id)

    def expire(self, export: Export) -> None:
        """End an export whose lease has expired, because its blocks may be reused."""
        if export.ended is None and export.deadline is not None and self._clock() >= export.deadline:
            export.ended = Reason.EXPIRED

    def _bury(self, transfer_id: str, reason: Reason) -> None:
        self._tombstones[transfer_id] = reason
        self._tombstones.move_to_end(transfer_id)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


def _append(known: list[list[int]], added: Sequence[list[int]]) -> None:
    for group, blocks in zip(known, added, strict=True):
        group += blocks
