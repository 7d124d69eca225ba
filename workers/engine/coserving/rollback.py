"""Undo an aborted iteration in five steps, after which the scheduler is as it was before the iteration.

vLLM advances `num_computed_tokens` and registers blocks in the prefix cache *before* the model runs. When
the model then leaves early, both are wrong: later requests would attend to blocks that were never computed.
Leaving any step out corrupts outputs or bookkeeping silently; the tests leave out each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.compat.coserving_scheduler import OpenScheduler, is_running
from workers.engine.coserving.iterations import ScheduledRequest


@dataclass(slots=True)
class Undo:
    """Iteration to undo, and the registered blocks that it should have written."""

    scheduled: tuple[ScheduledRequest, ...]
    scheduler: OpenScheduler
    garbage: frozenset[int] = frozenset()  # registered blocks that the iteration was to write

    def running(self) -> list[ScheduledRequest]:
        """Return the requests that still run, because clients may have disconnected meanwhile."""
        return [one for one in self.scheduled if is_running(one.request)]


def rewind_computed(undo: Undo) -> None:
    """1. Reset progress: no request has computed a token or has one in flight, because no other step ran."""
    for one in undo.running():
        one.request.num_computed_tokens = one.start
        one.request.num_output_placeholders = 0


def evict_written(undo: Undo) -> None:
    """2. Evict the blocks, including those of requests that ended meanwhile, so no request finds them."""
    undo.scheduler.kv_cache_manager.evict_blocks(set(undo.garbage))


def rewind_registered(undo: Undo) -> None:
    """3. Let requests register these blocks again when they are really computed.

    An adopted block is registered by the request that it was adopted from, although its adopter may have to
    compute it too (step 4): vLLM does not accept the same block twice.
    """
    for one in undo.running():
        undo.scheduler.limit_registered(one.request, one.not_its_to_register)


def truncate_sharers(undo: Undo) -> None:
    """4. Make requests that adopted such a block in the same step compute it themselves.

    They need not be scheduled: a request that waits for KV from the host adopted local hits in this step too.
    """
    garbage = set(undo.garbage)
    if not garbage:
        return
    scheduler = undo.scheduler
    admitted = [(one.request, max(one.not_its_to_register)) for one in undo.running() if one.admitted]
    for request, before in [*admitted, *((request, None) for request in scheduler.waiting_holders())]:
        first = scheduler.first_block_in(request, garbage, before)
        if first is not None:
            scheduler.compute_again_from(request, first * int(scheduler.block_size))


def restore_prefill_marks(undo: Undo) -> None:
    """5. Mark requests whose prefill should have finished as prefilling again."""
    for one in undo.running():
        request = one.request
        undo.scheduler.mark_prefilling(request, request.num_tokens - request.num_computed_tokens > 1)


Step = Callable[[Undo], None]
STEPS: tuple[Step, ...] = (
    rewind_computed,
    evict_written,
    rewind_registered,
    truncate_sharers,
    restore_prefill_marks,
)


def roll_back(
    scheduled: tuple[ScheduledRequest, ...], scheduler: OpenScheduler, steps: tuple[Step, ...] = STEPS
) -> int:
    """Undo the iteration of these requests; return how many registered blocks were evicted."""
    written = {block for one in scheduled for group in one.written for block in group}
    undo = Undo(scheduled, scheduler, frozenset(scheduler.hashed(written)))
    for step in steps:
        step(undo)
    return len(undo.garbage)
