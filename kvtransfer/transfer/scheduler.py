"""Scheduler side of the transfer: decides which requests export or fetch KV, and holds exported blocks."""

import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from vllm.v1.request import RequestStatus

from kvtransfer.metrics import Reason
from kvtransfer.plugins import EngineContext, Match, SchedulerSide, StepOutcome
from kvtransfer.retention.retained_conversations import transferred_tokens
from kvtransfer.transfer.peers import TransferSource

BlocksByGroup = Sequence[list[int]]  # block ids, by KV cache group
NULL = 0  # vLLM's null block, in place of blocks that a window has left


@dataclass(frozen=True, slots=True)
class Opened:
    """Export of a prefill that begins, or begins again after a preemption."""

    transfer_id: str
    blocks: BlocksByGroup
    total_tokens: int  # number of tokens to send
    prompt: str  # digest of the prompt


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch of the blocks that a request waits for."""

    request_id: str
    source: TransferSource
    skip: list[int]  # leading blocks that the decoder has or does not need, by group
    blocks: BlocksByGroup  # blocks to fill


@dataclass(slots=True)
class TransferOrder:
    """Work that the workers begin with a step."""

    voided: list[str] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    extended: list[tuple[str, BlocksByGroup]] = field(default_factory=list)
    progress: list[tuple[str, int]] = field(default_factory=list)  # transfer, tokens computed after the step
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # requests
    dismissed: list[TransferSource] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class TransferReport:
    """Exports whose blocks may be freed, each with the number of ranks that are done with it."""

    released: Counter[str] = field(default_factory=Counter)

    def merge(self, other: "TransferReport") -> "TransferReport":
        return TransferReport(self.released + other.released)


def prompt_digest(request: Any) -> str:
    """Return a digest of everything that determines a prompt's KV, which two engines can compare.

    Each leg of a turn renders the client's request itself. If a template has a clock, or a proxy changes one
    of the legs, the decoder would otherwise get the KV of another prompt. vLLM's block hashes start from a
    random number in each process and cannot be compared.
    """
    digest = xxhash.xxh3_128(array("q", request.prompt_token_ids or ()).tobytes())
    adapter = request.lora_request.lora_name if request.lora_request else ""
    named = [adapter, *(feature.identifier for feature in request.mm_features)]
    digest.update("\0".join(named).encode())
    return digest.hexdigest()


logger = logging.getLogger("conserve.kvtransfer.transfer")

DELIVERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class TransferScheduler(SchedulerSide):
    """Opens exports and fetches, and holds exported blocks for the time of their lease."""

    hit_source = "p2p"

    def __init__(self, context: EngineContext) -> None:
        self._config, self._kv_state = context.config, context.kv_state
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._ranks = int(context.vllm_config.parallel_config.world_size)
        self._groups = context.groups
        context.kv_state.holders.references["transfer"] = self.held_block_ids
        self._manager: Any = None
        self._pool: Any = None
        self._next = TransferOrder()
        self._exporting: dict[str, tuple[str, Any]] = {}  # request -> transfer, vLLM's request
        self._void: set[str] = set()  # exporting requests without blocks
        self._held: dict[str, list[Any]] = {}  # transfer -> blocks that we reference
        self._states: dict[str, list[Any]] = {}  # transfer -> states held before its prompt is complete
        self._released: Counter[str] = Counter()  # transfer -> ranks that released it
        self._sources: dict[str, TransferSource] = {}  # request -> producer, until the fetch is ordered
        self._fetching: dict[str, int] = {}  # request -> tokens on their way
        self._counts: Counter[str] = Counter()

    def held_block_ids(self) -> list[int]:
        held = (*self._held.values(), *self._states.values())
        return [block.block_id for blocks in held for block in blocks]

    def bind(self, manager: Any) -> None:
        self._manager, self._pool = manager, manager.block_pool

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            transfer_id = str(params.get("transfer_id") or request.request_id)
            if self._kv_state.kv_io_suspended:
                logger.warning("request %s is not exported: the engine shares its layers", request.request_id)
                self._counts[f"refused.{Reason.INVALID}"] += 1
            elif self._is_exported(transfer_id):
                logger.warning(
                    "request %s repeats transfer %s: not exported", request.request_id, transfer_id
                )
                self._counts[f"refused.{Reason.INVALID}"] += 1
            else:
                self._exporting[request.request_id] = transfer_id, request
        elif params.get("do_remote_prefill"):
            source = read_source(params, request)
            if source is None:
                logger.warning("request %s has unusable transfer parameters", request.request_id)
                self._counts[f"refused.{Reason.INVALID}"] += 1
            else:
                self._sources[request.request_id] = source

    def _is_exported(self, transfer_id: str) -> bool:
        """Return whether a transfer already has an export. A second prefill must not use its id."""
        return transfer_id in self._held or any(known == transfer_id for known, _ in self._exporting.values())

    def match(self, request: Any, computed_tokens: int) -> Match | None:
        if request.request_id not in self._sources:
            return None
        tokens = transferred_tokens(self._groups, request.num_prompt_tokens)
        return Match(tokens - computed_tokens, background=True)

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        source = self._sources.pop(request.request_id, None)
        if source is None:
            return
        if match is None:  # the prompt is here already, or too short
            self._next.dismissed.append(source)
            return
        tokens = transferred_tokens(self._groups, request.num_prompt_tokens)
        there = (tokens - match.tokens) // self._block_tokens
        ids = blocks.get_block_ids()
        skip = [max(there, group.count(NULL)) for group in ids]
        rest = [group[first:] for group, first in zip(ids, skip, strict=True)]
        self._next.fetches.append(Fetch(request.request_id, source, skip, rest))
        self._fetching[request.request_id] = match.tokens
        _correct_cached_tokens(request)

    def order(self, scheduler_output: Any) -> TransferOrder | None:
        if self._exporting:
            self._order_exports(scheduler_output)
        order, self._next = self._next, TransferOrder()
        return order or None

    def _order_exports(self, output: Any) -> None:
        for request_id, (transfer_id, request) in self._exporting.items():
            if request.status == RequestStatus.PREEMPTED and request_id not in self._void:
                self._void.add(request_id)
                self._next.voided.append(transfer_id)
                self._release(transfer_id)
        for new in output.scheduled_new_reqs:
            if new.req_id in self._exporting:
                self._open(new.req_id, new.block_ids)
                self._advance(new.req_id, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in self._exporting:
                continue
            added = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._open(request_id, added)
            elif added:
                self._next.extended.append((self._exporting[request_id][0], added))
            self._advance(request_id, cached.num_computed_tokens[index], output)

    def _open(self, request_id: str, blocks: BlocksByGroup) -> None:
        transfer_id, request = self._exporting[request_id]
        self._void.discard(request_id)
        tokens = transferred_tokens(self._groups, request.num_prompt_tokens)
        opened = Opened(transfer_id, blocks, tokens, prompt_digest(request))
        self._next.opened.append(opened)

    def _advance(self, request_id: str, computed: int, output: Any) -> None:
        if request_id in self._void:
            return
        tokens = computed + output.num_scheduled_tokens[request_id]
        transfer_id, request = self._exporting[request_id]
        if self._hold(transfer_id, request, tokens):
            self._next.progress.append((transfer_id, tokens))
            return
        logger.error("transfer %s: vLLM freed a block that the decoder needs", transfer_id)
        self._counts[f"refused.{Reason.INTERNAL}"] += 1
        self._void.add(request_id)
        self._release(transfer_id)

    def _hold(self, transfer_id: str, request: Any, computed: int) -> bool:
        """Reference the blocks that the decoder needs, as soon as they are computed.

        Returns False if vLLM has already freed one of these blocks. vLLM frees a state when a later step
        begins. After the prompt's last step it frees the blocks that are before the window.
        """
        prompt = request.num_prompt_tokens
        tokens = transferred_tokens(self._groups, prompt)
        if computed >= tokens and transfer_id not in self._held.keys() | self._states.keys():
            states = self._needed(request, tokens, prompt, state=True)
            if states is None:
                return False
            self._states[transfer_id] = states
        if computed >= prompt and transfer_id not in self._held:
            others = self._needed(request, tokens, prompt, state=False)
            if others is None:
                return False
            self._held[transfer_id] = self._states.pop(transfer_id) + others
        return True

    def _needed(self, request: Any, tokens: int, prompt: int, state: bool) -> list[Any] | None:
        """Reference and return the blocks of states, or of other layers, that the decoder needs.

        Returns None if vLLM has already freed one of them.
        """
        first, end = min(tokens, prompt - 1), -(-tokens // self._block_tokens)
        by_group = zip(self._groups, self._manager.get_block_ids(request.request_id), strict=True)
        needed = [ids[group.first_block(first) : end] for group, ids in by_group if group.state is state]
        blocks = [self._pool.blocks[block] for ids in needed for block in ids]
        if any(block.is_null for block in blocks):
            return None
        self._pool.touch(blocks)
        return blocks

    def on_outcome(self, outcome: StepOutcome) -> None:
        for request_id in outcome.loaded & self._fetching.keys():
            del self._fetching[request_id]
        if outcome.failed_blocks:
            # Blocks that a failed load did not fill must not stay in the prefix cache.
            self._pool.evict_blocks(set(outcome.failed_blocks))
            self._counts["failed_blocks"] += len(outcome.failed_blocks)
        if outcome.report is not None:
            for transfer_id, ranks in outcome.report.released.items():
                self._released[transfer_id] += ranks
                if self._released[transfer_id] >= self._ranks:
                    self._release(transfer_id)

    def _release(self, transfer_id: str) -> None:
        self._released.pop(transfer_id, None)
        held = self._held.pop(transfer_id, []) + self._states.pop(transfer_id, [])
        self._pool.free_blocks(reversed(held))

    def on_finished(self, request: Any, block_ids: BlocksByGroup) -> dict[str, Any] | None:
        request_id = request.request_id
        if source := self._sources.pop(request_id, None):  # the request ended before it was scheduled
            self._next.dismissed.append(source)
        if self._fetching.pop(request_id, None) is not None:
            self._next.cancelled.append(request_id)
        if request_id not in self._exporting:
            return None
        transfer_id, _ = self._exporting.pop(request_id)
        voided = request_id in self._void
        self._void.discard(request_id)
        if request.status not in DELIVERED or voided or transfer_id not in self._held:
            self._next.aborted.append(transfer_id)
            self._release(transfer_id)
            return None
        self._next.finished.append(transfer_id)
        return self._answer(transfer_id, request)

    def _answer(self, transfer_id: str, request: Any) -> dict[str, Any]:
        """Return the `kv_transfer_params` of the decode leg, for routers that start it after the prefill.

        If a conversation moves to another decoder, they contain the tokens of its prompt.
        """
        moves = (request.kv_transfer_params or {}).get("moves")
        return {
            **({"prompt_token_ids": list(request.prompt_token_ids)} if moves else {}),
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_host": self._config.host,
            "remote_port": self._config.port,
            "remote_epoch": self._config.epoch,
            "remote_num_tokens": request.num_prompt_tokens,
        }

    def reset(self) -> None:
        for transfer_id in [*self._held, *self._states]:
            self._next.aborted.append(transfer_id)
            self._release(transfer_id)

    def take_counts(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return counts


def _correct_cached_tokens(request: Any) -> None:
    """Correct the cached tokens that the client sees: those that a prefiller computed do not count.

    KV from the conversation's former decoder does count: `cached_tokens` of the request's parameters.
    """
    if (stats := request.prefill_stats) is not None:  # None after the first token
        before = request.kv_transfer_params.get("cached_tokens", 0)
        stats.num_cached_tokens = min(stats.num_cached_tokens, max(stats.num_local_cached_tokens, before))


def read_source(params: Mapping[str, Any], request: Any) -> TransferSource | None:
    host, port = params.get("remote_host"), params.get("remote_port")
    transfer_id, epoch = params.get("transfer_id"), params.get("remote_epoch")
    if not (isinstance(host, str) and host and isinstance(port, int) and 0 < port < 65536):
        return None
    if not (isinstance(transfer_id, str) and transfer_id and (epoch is None or isinstance(epoch, int))):
        return None
    return TransferSource(host, port, transfer_id, epoch, prompt_digest(request))
