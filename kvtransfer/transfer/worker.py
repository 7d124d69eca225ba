"""Worker side of the transfer: serves this rank's exports and fetches from other engines."""

import logging
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from kvtransfer.config import GIB, ConnectorConfigError, transfer_secret
from kvtransfer.metrics import Reason
from kvtransfer.plugins import EngineContext, LoadsEnded, Plugin, WorkerSide
from kvtransfer.side_stream import cuda_of
from kvtransfer.transfer.exports import Exports
from kvtransfer.transfer.kv_memory import BlockMemory, HostBlockMemory
from kvtransfer.transfer.peers import (
    Cancellation,
    TransferEnd,
    TransferServer,
    TransferSource,
    dismiss,
    fetch,
)
from kvtransfer.transfer.scheduler import (
    Fetch,
    TransferOrder,
    TransferReport,
    TransferScheduler,
)
from kvtransfer.transfer.staging import StagedBlockMemory
from kvtransfer.transfer.wire import TransferRefused

logger = logging.getLogger("conserve.kvtransfer.transfer")

MAX_FETCHES = 64  # at once; further ones wait for a thread


class TransferWorker(WorkerSide):
    """Worker side of the transfer on one rank: a server for exports, and threads for fetches."""

    def __init__(self, context: EngineContext, rank: int) -> None:
        self._config = context.config
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._num_blocks = int(context.kv_cache_config.num_blocks)
        self._group_of = {layer: n for n, group in enumerate(context.groups) for layer in group.layers}
        self._states = {layer for group in context.groups if group.state for layer in group.layers}
        ranks = int(context.vllm_config.parallel_config.world_size)
        config = context.config
        self._me = TransferEnd(config.epoch, rank, ranks, config.timeout_s, transfer_secret(), config.encrypt)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-fetch")
        self._cancellations: dict[str, Cancellation] = {}
        self._lock = threading.Lock()
        self._ended = LoadsEnded()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._memory: BlockMemory
        self._layers: dict[str, int] = {}
        self._exports: Exports
        self._hooked: set[str] = set()  # layers around which vLLM calls the connector: all in most models
        self._warned = False
        self._server: TransferServer | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        self._memory = self._memory_of(kv_caches)
        self._layers = {layer: index for index, layer in enumerate(self._memory.layers)}
        self._exports = Exports(self._memory, self._block_tokens, self._config.lease_s, time.monotonic)
        if self._config.port:
            self._server = self._serve()

    def _memory_of(self, kv_caches: Mapping[str, Any]) -> BlockMemory:
        cuda = cuda_of(next(iter(kv_caches.values())))
        if cuda is None:
            return HostBlockMemory(kv_caches, self._num_blocks, self._group_of)
        window = int(self._config.staging_gib * GIB) // self._me.ranks
        return StagedBlockMemory(kv_caches, self._num_blocks, window, cuda, self._group_of)

    def _serve(self) -> TransferServer:
        address = self._config.host, self._config.port + self._me.rank
        try:
            listener = socket.create_server(address)
        except OSError as error:
            raise ConnectorConfigError(
                f"the KV transfer server cannot listen on {address}: {error}"
            ) from error
        return TransferServer(listener, self._me, self._exports)

    def before_step(self, order: TransferOrder | None) -> None:
        self._exports.begin_step(())
        if order is None:
            return
        for transfer_id in order.voided:
            self._exports.void(transfer_id)
        for transfer_id in order.aborted:
            self._exports.abort(transfer_id)
        for opened in order.opened:
            self._exports.open(opened.transfer_id, opened.blocks, opened.total_tokens, opened.prompt)
        for transfer_id, blocks in order.extended:
            self._exports.extend(transfer_id, blocks)
        for transfer_id in order.finished:
            self._exports.finish(transfer_id)
        self._exports.begin_step(order.progress)
        for request_id in order.cancelled:
            if cancellation := self._cancellations.get(request_id):
                cancellation.cancel()
        if order.fetches:
            self._memory.mark()
        for wanted in order.fetches:
            cancellation = self._cancellations[wanted.request_id] = Cancellation()
            self._in_thread(wanted.request_id, partial(self._fetch, wanted, cancellation))
        for source in order.dismissed:
            self._in_thread(source.transfer_id, partial(self._dismiss, source))

    def needs_layers(self, order: TransferOrder | None) -> bool:
        """Return whether the step computes a prompt that is exported. Fetches need no hooks."""
        return order is not None and bool(order.progress)

    def before_layer(self, layer: str) -> None:
        self._hooked.add(layer)

    def after_layer(self, layer: str) -> None:
        self._exports.after_layer(self._layers[layer])

    def after_step(self) -> None:
        """Let decoders read the layers without hooks: layers with a state, or all if vLLM calls no hooks."""
        if self._exports.written:
            self._warn_once()
            for layer in self._states if self._hooked else self._layers:
                self._exports.after_layer(self._layers[layer])

    def _warn_once(self) -> None:
        if self._config.layer_hooks and not (self._warned or self._hooked):
            logger.warning(
                "vLLM does not call connectors between this model's layers: KV is sent after each step"
            )
            self._warned = True

    def _in_thread(self, name: str, work: Callable[[], None]) -> None:
        self._threads.submit(work).add_done_callback(partial(_log_fault, name))

    def _fetch(self, wanted: Fetch, cancellation: Cancellation) -> None:
        start = time.monotonic()
        received = 0
        reason: Reason | None = Reason.INTERNAL  # stays if an unexpected exception is raised
        try:
            received = fetch(wanted.source, wanted.skip, wanted.blocks, self._memory, self._me, cancellation)
            reason = None
        except TransferRefused as refused:
            reason = refused.reason
            logger.warning("request %s recomputes its prompt: %s", wanted.request_id, refused)
        finally:
            self._record(wanted, reason, received, time.monotonic() - start)

    def _record(self, wanted: Fetch, reason: Reason | None, received: int, seconds: float) -> None:
        """Record that a fetch has ended, even if it failed, because vLLM waits for the request's load."""
        with self._lock:
            self._ended.requests.add(wanted.request_id)
            if reason is not None:
                self._ended.failed.add(wanted.request_id)
                self._ended.failed_blocks.update(*wanted.blocks)
                self._counts[f"refused.{reason}"] += 1
            else:
                self._counts["transfers"] += 1
                self._counts["transfer_bytes"] += received
                self._counts["transfer_seconds"] += seconds

    def _dismiss(self, source: TransferSource) -> None:
        try:
            dismiss(source, self._memory, self._me)
        except TransferRefused as refused:  # the producer frees it when the lease expires
            logger.info("transfer %s not dismissed: %s", source.transfer_id, refused)

    def loads_ended(self) -> LoadsEnded:
        with self._lock:
            ended, self._ended = self._ended, LoadsEnded()
        for request_id in ended.requests:
            self._cancellations.pop(request_id, None)
        return ended

    def report(self) -> TransferReport | None:
        released = self._exports.take_released()
        return TransferReport(Counter(released)) if released else None

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        for cancellation in self._cancellations.values():
            cancellation.cancel()
        self._memory.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def take_counts(self) -> Mapping[str, float]:
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
        return counts


def _log_fault(name: str, ended: Future[None]) -> None:
    """Log an unexpected exception of a thread, which would otherwise be lost."""
    if not ended.cancelled() and (fault := ended.exception()) is not None:
        logger.error("transfer for %s failed", name, exc_info=fault)


class TransferPlugin(Plugin):
    name = "transfer"
    scheduler = TransferScheduler
    worker = TransferWorker
