"""What the engine reports: its state, computed from conversations and block pool, and the feed's commands."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.v1.request import RequestStatus

from kvtransfer.control.control_socket import FeedCommand, FeedServer, RecentlyNamed, Reply
from kvtransfer.plugins import EngineContext, Match, Plugin, SchedulerSide, StepOutcome
from kvtransfer.retention.retained_conversations import (
    RetentionPhase,
    beside_tokens,
    block_key,
    transferred_tokens,
)
from kvtransfer.shared_state import block_faults, host_faults
from placement.engines import EngineState
from placement.scheduling.prompt_order import PromptRate

logger = logging.getLogger("conserve.kvtransfer.report")


class ReportScheduler(SchedulerSide):
    """Last of the own plugins: what it reports is what the others left."""

    def __init__(self, context: EngineContext) -> None:
        self._config = context.config
        self._residence = context.residence
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._groups = context.groups
        self._commands = context.commands
        self._full = next((n for n, group in enumerate(context.groups) if not group.window), 0)
        self._full_groups = sum(1 for group in context.groups if not group.window)
        self._per_token = max(1, self._full_groups)
        self._beside = beside_tokens(context.groups) if self._full_groups else 0
        self._requests: dict[str, Any] = {}
        self._here: dict[str, int] = {}  # tokens of KV a request found that give way to nobody, as it came
        # Tokens of a prompt that were there, or on their way, as it came; until it has blocks. From then on
        # vLLM counts them, and takes back those that did not come.
        self._known: dict[str, int] = {}
        self._allocated: set[str] = set()  # since the last step's end
        # Learnt by the co-serving scheduler; vLLM's own tells nothing.
        self.prompt_rate = PromptRate()
        self.prompt_share = 1.0  # of its time, what requests that decode leave to prompts
        self.prompts = 0  # iterations with more than a few tokens of prompts
        self.prefill_curve: tuple[float, float, float] | None = None
        self.counts: Counter[str] = Counter()
        self._manager: Any = None
        self._pool: Any = None
        self._seq = 0
        self._confirmed, self._parked, self._unparked = (RecentlyNamed() for _ in range(3))
        self._feed: FeedServer | None = None

    def bind(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        if self._config.feed:
            commands = {
                "release": self._release,
                "drain": self._drain,
                "check": self._check,
                **self._commands,
            }
            self._feed = FeedServer(Path(self._config.feed), self.snapshot, commands)

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        self._known[request.request_id] = self._known_of(request)
        self._here[request.request_id] = self._here_of(request)
        self._notify()

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        self._residence.loaded.discard(request.request_id)  # of an allocation before
        self._allocated.add(request.request_id)
        self._notify()

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        self._requests.pop(request.request_id, None)
        self._known.pop(request.request_id, None)
        self._here.pop(request.request_id, None)
        if request.request_id in self._residence.loading - self._residence.loaded:
            self._residence.departing.add(request.request_id)
        self._residence.loaded.discard(request.request_id)
        self._residence.loading.discard(request.request_id)  # here, because the plugins before still ask
        self._notify()

    def order(self, scheduler_output: Any) -> None:
        """The last step before the engine sleeps schedules nothing: a time to look at ourselves."""
        for request_id in scheduler_output.preempted_req_ids or ():
            if (request := self._requests.get(request_id)) is not None:
                self._known[request_id] = self._found_of(request)
        if not scheduler_output.num_scheduled_tokens:
            for fault in self.faults():
                self._residence.counts["faults"] += 1
                logger.error("integrity: %s", fault)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self._residence.loaded |= outcome.loaded & self._requests.keys()
        self._residence.departing -= outcome.loaded
        for request_id in self._allocated:
            self._known.pop(request_id, None)
        self._allocated.clear()
        self._notify()

    def take_counts(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        return counts

    def shutdown(self) -> None:
        if self._feed is not None:
            self._feed.close()

    def _notify(self) -> None:
        if self._feed is not None:
            self._feed.notify()

    def snapshot(self) -> EngineState:
        """Runs in the feed's thread; only looks things up, so a step under way may move the sums."""
        self._residence.let_time_pass()
        with self._residence.lock:
            requests = list(self._requests.values())
            offline_blocks = self._blocks_of([r for r in requests if r.priority > 0])
            ending = self._ending_blocks()
            lacking = sum(map(self._lacks, requests))
            free = int(self._pool.get_num_free_blocks()) + len(ending)
            used = int(self._pool.num_gpu_blocks) - 1 - free
            retained_free, idle, on_host = self._idle_blocks(ending)
            host = self._residence.host
            host_used = host.used
            self._seq += 1
            self._confirmed.add(self._residence.confirmed, self._seq)
            self._residence.confirmed.clear()
            self._parked.add(self._residence.parked, self._seq)
            self._residence.parked.clear()
            self._unparked.add(self._residence.unparked, self._seq)
            self._residence.unparked.clear()
            parked = {key: seq for key, seq in self._parked.all().items() if self._is_parked(key)}
            unparked = {key: seq for key, seq in self._unparked.all().items() if not self._is_parked(key)}
            draining = self._residence.draining
        running = [r for r in requests if r.status == RequestStatus.RUNNING]
        offline_running = sum(1 for r in running if r.priority > 0)
        offline = sum(1 for r in requests if r.priority > 0)
        live = max(0, used - offline_blocks) + retained_free
        return EngineState(
            engine=self._config.engine,
            epoch=self._config.epoch,
            seq=self._seq,
            live_tokens=live * self._block_tokens,
            parked_tokens=on_host * self._block_tokens,
            offline_tokens=offline_blocks * self._block_tokens,
            free_tokens=max(0, free - retained_free) * self._block_tokens,
            running=len(running) - offline_running,
            waiting=len(requests) - offline - (len(running) - offline_running),
            offline_running=offline_running,
            offline_waiting=offline - offline_running,
            confirmed=self._confirmed.all(),
            draining=draining,
            host_used_tokens=host_used * self._block_tokens,
            host_free_tokens=host.free * self._block_tokens,
            parked=parked,
            unparked=unparked,
            named_after=self._confirmed.after,
            idle_tokens=idle * self._block_tokens,
            waiting_prompt_tokens=sum(map(self._to_compute, requests)),
            prompt_tokens_per_s=self.prompt_rate.tokens_per_s,
            prompt_share=self.prompt_share if running else 1.0,
            waiting_kv_tokens=lacking,
            split=self._residence.split,
            kv_per_token=self._per_token,
            kv_per_conversation=self._beside,
            prompts=self.prompts,
            prefill_curve=self.prefill_curve,
        )

    def _to_compute(self, request: Any) -> int:
        """Before its first token, if it is a turn's."""
        if request.priority > 0 or request.num_output_tokens:
            return 0
        known = max(request.num_computed_tokens, self._known.get(request.request_id, 0))
        return int(max(0, request.num_prompt_tokens - known))

    def _lacks(self, request: Any) -> int:
        """Of KV, before a turn that waits can run."""
        if request.priority > 0 or (request.num_output_tokens and request.status == RequestStatus.RUNNING):
            return 0
        has = self._blocks_of([request]) * self._block_tokens or self._here.get(request.request_id, 0)
        return int(max(0, request.num_tokens * self._per_token + self._beside - has))

    def _here_of(self, request: Any) -> int:
        """What is counted as held already; not what gives way."""
        blocks = 0
        for block in request.block_hashes:
            found = self._pool.get_cached_block(block, [self._full])
            if not found:
                break
            yields = self._config.idle_kv_yields or self._residence.host.stored(block_key(block, self._full))
            if not found[0].ref_cnt and yields:
                break
            blocks += 1
        return blocks * self._block_tokens * self._per_token

    def _known_of(self, request: Any) -> int:
        """Of what comes from a prefiller nothing is computed here, and of what is on the host."""
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return transferred_tokens(self._groups, int(request.num_prompt_tokens))
        return self._found_of(request)

    def _found_of(self, request: Any) -> int:
        chain, blocks = request.block_hashes, 0
        while blocks < len(chain) and self._is_here(chain[blocks], self._full):
            blocks += 1
        states = [number for number, group in enumerate(self._groups) if group.state]
        while blocks and not all(self._is_here(chain[blocks - 1], number) for number in states):
            blocks -= 1
        return blocks * self._block_tokens

    def _is_here(self, block: bytes, group: int) -> bool:
        """On the accelerator, or on the host."""
        cached = self._pool.get_cached_block(block, [group]) is not None
        return cached or self._residence.host.stored(block_key(block, group))

    def _ending_blocks(self) -> set[int]:
        """Blocks that nobody but a copy or a lease that is over holds."""
        ids = {block for held in self._residence.ending.values() for block in held()}
        return {block for block in ids if self._pool.blocks[block].ref_cnt == 1}

    def _idle_blocks(self, ending: set[int]) -> tuple[int, int, int]:
        """Free blocks that are retained, those of them that give way, and those of parked conversations.

        What is on the host too gives way. All does where it may be lost (`idle_kv_yields`), and where layers
        can be shared with another engine: nothing is copied meanwhile, and idle conversations alone are no
        reason to share or to go on with it.
        """
        conversations = self._residence.conversations
        retained: set[tuple[bytes, int]] = set()
        parked: set[tuple[bytes, int]] = set()
        for conversation in conversations:
            if conversation.phase is RetentionPhase.RETAINED:
                retained.update(conversations.blocks(conversation))
            elif conversation.phase is RetentionPhase.PARKED:
                parked.update(conversations.blocks(conversation))
        free = [block_key(*block) for block in retained if self._is_free(*block, ending)]
        all_yield = self._config.idle_kv_yields or self._residence.split is not None
        idle = len(free) if all_yield else sum(map(self._residence.host.stored, free))
        return len(free), idle, len(parked - retained)

    def _is_free(self, block_hash: bytes, group: int, ending: set[int]) -> bool:
        found = self._pool.get_cached_block(block_hash, [group])
        return bool(found) and (found[0].ref_cnt == 0 or found[0].block_id in ending)

    def _blocks_of(self, requests: list[Any]) -> int:
        """Null blocks are block 0."""
        ids = (self._manager.get_block_ids(request.request_id) for request in requests)
        return sum(1 for groups in ids for group in groups for block in group if block)

    def faults(self) -> list[str]:
        """Of an idle engine; nothing is known about one in the middle of a step."""
        with self._residence.lock:
            if not self.at_rest():
                return []
            references = {holder: ids() for holder, ids in self._residence.references.items()}
            found = block_faults(self._pool.blocks, self._pool.get_num_free_blocks(), references)
            return found + host_faults(self._residence.host, self._residence.conversations)

    def account_for(self, holder: str, blocks: Callable[[], Iterable[int]]) -> None:
        """Tells the integrity check of another holder of references: block ids, one a reference."""
        self._residence.references[holder] = blocks

    def _release(self, command: FeedCommand) -> Reply:
        return Reply(self._residence.release(command.conversation))

    def _drain(self, command: FeedCommand) -> Reply:
        self._residence.drain(command.draining)
        return Reply(True)

    def _check(self, command: FeedCommand) -> Reply:
        return Reply(self.at_rest(), tuple(self.faults()))

    def _is_parked(self, key: str) -> bool:
        conversation = self._residence.conversations.get(key)
        return conversation is not None and conversation.phase is RetentionPhase.PARKED

    def at_rest(self) -> bool:
        return not (self._requests or self._residence.departing or self._residence.held_by_others)


class ReportPlugin(Plugin):
    name = "report"
    scheduler = ReportScheduler
