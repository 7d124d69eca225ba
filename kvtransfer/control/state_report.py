"""Plugin that reports the engine's state to its keeper and carries out the keeper's commands."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtransfer.checkpoint.host_index import block_faults, host_faults
from kvtransfer.compat.block_cache import remember_engine_core, wake_engine
from kvtransfer.control.control_socket import ControlSocketServer, EngineCommand, Reply
from kvtransfer.control.engine_snapshot import EngineSnapshot, PromptSpeed
from kvtransfer.control.waiting_prompts import WaitingPrompts
from kvtransfer.plugins import EngineContext, Match, Plugin, SchedulerSide, StepOutcome
from placement.engines import EngineState

logger = logging.getLogger("conserve.kvtransfer.report")

IDLE_STEP_S = 1.0  # least time between two steps of an engine that has no requests and still holds KV


class ReportScheduler(SchedulerSide):
    """Scheduler side of the state report. It runs after all built-in plugins, to report their results."""

    def __init__(self, context: EngineContext) -> None:
        self._config, self._kv_state, self._commands = context.config, context.kv_state, context.commands
        block_tokens = int(context.vllm_config.cache_config.block_size)
        evictable = context.config.idle_kv_evictable
        self._prompts = WaitingPrompts(context.kv_state, context.groups, block_tokens, evictable)
        self._snapshot = EngineSnapshot(context.config, context.kv_state, self._prompts, block_tokens)
        self._requests: dict[str, Any] = {}
        self._pool: Any = None
        self._socket: ControlSocketServer | None = None
        self._step_asked, self._next_ask_at = False, 0.0
        remember_engine_core()
        self.counts: Counter[str] = Counter()

    @property
    def speed(self) -> PromptSpeed:
        return self._snapshot.speed

    def bind(self, manager: Any) -> None:
        self._prompts.bind(manager)
        self._pool = self._snapshot.pool = manager.block_pool
        if self._config.control_socket:
            commands = {
                "release": self._release,
                "drain": self._drain,
                "check": self._check,
                **self._commands,
            }
            self._socket = ControlSocketServer(Path(self._config.control_socket), self.snapshot, commands)

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        self._prompts.arrived(request)
        self._notify()

    def after_allocation(self, request: Any, blocks: Any, match: Match | None) -> None:
        self._kv_state.loads.loaded.discard(request.request_id)  # of an earlier allocation
        self._prompts.allocated(request.request_id)
        self._notify()

    def on_finished(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        self._requests.pop(request.request_id, None)
        self._prompts.finished(request.request_id)
        loads = self._kv_state.loads
        if request.request_id in loads.loading - loads.loaded:
            loads.departing.add(request.request_id)
        loads.loaded.discard(request.request_id)
        loads.loading.discard(request.request_id)  # not earlier: plugins before this one read it
        self._notify()

    def order(self, scheduler_output: Any) -> None:
        """Check integrity in steps that schedule nothing, such as the last step before the engine sleeps.

        All blocks are visited only if the totals of blocks or slots disagree, because a visit takes long
        and a request may arrive.
        """
        self._step_asked = False
        for request_id in scheduler_output.preempted_req_ids or ():
            if (request := self._requests.get(request_id)) is not None:
                self._prompts.preempted(request)
        if not scheduler_output.num_scheduled_tokens and self.is_idle() and not self._sums_agree():
            for fault in self.faults():
                self._kv_state.counts["faults"] += 1
                logger.error("integrity: %s", fault)

    def on_outcome(self, outcome: StepOutcome) -> None:
        self._kv_state.loads.loaded |= outcome.loaded & self._requests.keys()
        self._kv_state.loads.departing -= outcome.loaded
        self._prompts.step_ended()
        self._notify()

    def take_counts(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        return counts

    def shutdown(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def needs_step(self) -> bool:
        return self._step_asked

    def snapshot(self) -> EngineState:
        """Return the engine's state for the keeper. The socket's thread calls this at least once a second."""
        self._ask_for_step()
        return self._snapshot.take(list(self._requests.values()))

    def _ask_for_step(self) -> None:
        """Make an engine without requests step if it holds KV for a transfer, a copy, or a move to the disk.

        Workers report the end of a transfer, copy or move only in a step, and vLLM steps only for requests.
        """
        now = self._kv_state.clock()
        if self._requests or now < self._next_ask_at:
            return
        with self._kv_state.lock:
            held = self._kv_state.holders.any_held or self._kv_state.host.moving
        if held:
            self._step_asked, self._next_ask_at = True, now + IDLE_STEP_S
            wake_engine()

    def is_idle(self) -> bool:
        loads = self._kv_state.loads
        return not (self._requests or loads.departing or loads.held_by_others)

    def faults(self) -> list[str]:
        """Return the faults of an idle engine; an empty list for a busy engine, which is not checked."""
        with self._kv_state.lock:
            if not self.is_idle():
                return []
            references = {holder: ids() for holder, ids in self._kv_state.holders.references.items()}
            found = block_faults(self._pool.blocks, self._pool.get_num_free_blocks(), references)
            return found + host_faults(self._kv_state.host, self._kv_state.conversations)

    def _sums_agree(self) -> bool:
        with self._kv_state.lock:
            host, blocks = self._kv_state.host, self._kv_state.conversations.blocks
            held = {block for ids in self._kv_state.holders.references.values() for block in ids()}
            used = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()  # without the null block
            return used == len(held) and host.used == blocks.host_copies and host.is_complete

    def account_for(self, holder: str, blocks: Callable[[], Iterable[int]]) -> None:
        """Make the integrity check count a holder's references; `blocks` returns one block id for each."""
        self._kv_state.holders.references[holder] = blocks

    def _notify(self) -> None:
        if self._socket is not None:
            self._socket.notify()

    def _release(self, command: EngineCommand) -> Reply:
        return Reply(self._kv_state.release(command.conversation))

    def _drain(self, command: EngineCommand) -> Reply:
        self._kv_state.drain(command.draining)
        return Reply(True)

    def _check(self, command: EngineCommand) -> Reply:
        return Reply(self.is_idle(), tuple(self.faults()))


class ReportPlugin(Plugin):
    name = "report"
    scheduler = ReportScheduler
