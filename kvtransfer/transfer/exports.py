"""The exports of a prefiller: which blocks, how far each layer is written, for how long, to whom.

The worker's thread says what a step computes, the memory says when a layer of it is readable. An export is
opened when its prefill begins, fills while it runs, and has a lease from the moment it is
finished. Its generation changes whenever its blocks do, so that bytes read under an older generation are
never taken for its contents. What is over stays known for a while as a tombstone, so that a late consumer is
refused at once instead of waiting for a prefill that will not come.
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
    transfer_id: str
    total_tokens: int
    prompt: str
    generation: int
    blocks: list[list[int]]  # by KV cache group
    written: list[int]  # tokens by layer whose KV is in the blocks
    deadline: float | None = None  # the lease's end; None while the prefill runs
    ended: Reason | None = None
    delivered: int = 0  # lanes whose layers the consumer has


@dataclass(frozen=True, slots=True)
class Written:
    """So many tokens of a prompt are in place in one layer, in the blocks of one generation."""

    transfer_id: str
    generation: int
    tokens: int


@dataclass(slots=True)
class Reader:
    """Progress of one consumer's connection, a lane, through one export."""

    export: Export
    skip: Sequence[int]  # by KV cache group
    layers: Sequence[int]  # that are its
    lanes: int  # of this consumer
    generation: int = -1
    sent: list[int] = field(default_factory=list)  # blocks by layer


@dataclass(frozen=True, slots=True)
class Ready:
    """Blocks that can be sent now: (layer, index of the first block, block ids)."""

    generation: int
    runs: list[tuple[int, int, list[int]]]
    complete: bool  # nothing remains after these


class Exports:
    """Shared by the worker's thread, which writes, and the server's threads, which read."""

    def __init__(
        self,
        memory: BlockMemory,
        block_tokens: int,
        lease_s: float,
        clock: Callable[[], float],
        renewed: Callable[[], None] = lambda: None,
    ) -> None:
        """`renewed` is called whenever a lease is."""
        self.memory = memory
        self._renewed = renewed
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._clock = clock
        self._groups = 1 + max(memory.groups)
        self._exports: dict[str, Export] = {}
        self._tombstones: OrderedDict[str, Reason] = OrderedDict()
        self._generations = itertools.count(1)
        self._changed = threading.Condition()
        self.written: list[Written] = []  # by the step that runs

    def __len__(self) -> int:
        return len(self._exports)

    # The worker's thread

    def open(self, transfer_id: str, blocks: Sequence[list[int]], total_tokens: int, prompt: str) -> int:
        """A prefill begins, or begins again after a preemption; returns the generation of its blocks."""
        with self._changed:
            export = self._exports.get(transfer_id)
            if export is None:
                export = self._exports[transfer_id] = Export(transfer_id, total_tokens, prompt, 0, [], [])
                if self._tombstones.pop(transfer_id, None) is Reason.TAKEN:  # dismissed before it began
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
        """The prefill lost its blocks; it will begin again."""
        with self._changed:
            if export := self._exports.get(transfer_id):
                self._restart(export)

    def begin_step(self, progress: Iterable[tuple[str, int]]) -> None:
        """Tokens of each prompt that are computed once this step is."""
        self.written = []
        for transfer_id, tokens in progress:
            if export := self._exports.get(transfer_id):
                tokens = min(tokens, export.total_tokens)
                self.written.append(Written(transfer_id, export.generation, tokens))

    def after_layer(self, layer: int) -> None:
        if self.written:
            self.memory.publish(partial(self.wrote, layer, self.written))

    def wrote(self, layer: int, written: Iterable[Written]) -> None:
        """KV of one layer is readable. It may be told late: then the generation says of which blocks."""
        with self._changed:
            for progress in written:
                export = self._exports.get(progress.transfer_id)
                if export is not None and export.generation == progress.generation:
                    export.written[layer] = progress.tokens
            self._changed.notify_all()

    def finish(self, transfer_id: str) -> None:
        """The prefill is over and its blocks are held: the lease begins."""
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
        """Finished exports that were delivered, or whose lease ran out: their blocks may be reused.

        From here on nobody is told that what he read of them is good.
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
        """Waits for the prefill to begin: both legs are started together, and the decoder may be first.

        Without `layers` it is for all of them.
        """
        every = range(len(self.memory.layers))
        layers = every if layers is None else layers
        if not set(layers) <= set(every) or len(set(layers)) < len(layers):
            raise TransferRefused(Reason.PROTOCOL, f"no such layers, or some twice: {layers}")
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
        """The next blocks to send."""
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
        """Whether everything read under this generation was the export's when it was read."""
        with self._changed:
            self._check(reader.export)
            return reader.export.generation == generation

    def renew(self, reader: Reader) -> None:
        """A piece has left: as long as its consumer takes more, the lease goes on. Who takes none is cut off
        by the connection's own limit."""
        with self._changed:
            self._check(reader.export)
            if reader.export.deadline is not None:
                reader.export.deadline = self._clock() + self._lease_s
                self._renewed()

    def delivered(self, reader: Reader) -> None:
        """The consumer has this lane's layers. With those of all its lanes, it has everything."""
        with self._changed:
            reader.export.delivered += 1
            if reader.export.delivered >= reader.lanes and reader.export.ended is None:
                reader.export.ended = Reason.TAKEN

    def leave(self, reader: Reader) -> None:
        """The consumer is gone before it had this lane's layers; it does not come back, on any lane."""
        with self._changed:
            if reader.export.ended is None:
                reader.export.ended = Reason.TAKEN
                self._changed.notify_all()

    def dismiss(self, transfer_id: str) -> None:
        """The consumer needs nothing of it."""
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
        """Its blocks are read no more."""
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
        """Blocks that will not change any more: the last, partial one counts when the prompt is complete."""
        if tokens == export.total_tokens:
            return -(-tokens // self._block_tokens)
        return tokens // self._block_tokens

    def _check(self, export: Export) -> None:
        self.expire(export)
        if export.ended is not None:
            raise TransferRefused(export.ended, export.transfer_id)

    def expire(self, export: Export) -> None:
        """Ends it where its lease has run out: what its blocks hold since may be another's."""
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
