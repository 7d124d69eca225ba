"""Roll-back of an aborted iteration: five steps, after which the scheduler is as it was before the iteration.

vLLM advances `num_computed_tokens` and registers blocks in the prefix cache *before* the model runs. When the
forward pass ends early, both are wrong: later requests would attend to blocks that were never computed.
Leaving out any step corrupts outputs or bookkeeping silently. The tests leave out each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.compat.coserving_scheduler import OpenScheduler, is_running
from workers.engine.coserving.iterations import ScheduledRequest


@dataclass(slots=True)
class Undo:
    """Iteration to undo, and the registered blocks that it did not write."""

    scheduled: tuple[ScheduledRequest, ...]
    scheduler: OpenScheduler
    garbage: frozenset[int] = frozenset()  # registered blocks that the iteration should have written

    def running(self) -> list[ScheduledRequest]:
        """Return the requests that still run. Others have ended, because their clients disconnected."""
        return [one for one in self.scheduled if is_running(one.request)]


def rewind_computed(undo: Undo) -> None:
    """1. Reset the progress of requests: none computed a token, and none has one in flight."""
    for one in undo.running():
        one.request.num_computed_tokens = one.start
        one.request.num_output_placeholders = 0


def evict_written(undo: Undo) -> None:
    """2. Evict the unwritten blocks, also of requests that ended meanwhile, so that no request finds them."""
    undo.scheduler.kv_cache_manager.evict_blocks(set(undo.garbage))


def rewind_registered(undo: Undo) -> None:
    """3. Let requests register these blocks again when they really compute them.

    A block that was adopted as a prefix hit is registered only by the request that it was adopted from, even
    if the adopter has to compute it too (step 4), because vLLM does not accept a block twice.
    """
    for one in undo.running():
        undo.scheduler.limit_registered(one.request, one.not_its_to_register)


def truncate_sharers(undo: Undo) -> None:
    """4. Make requests that adopted an unwritten block as a prefix hit compute it themselves.

    These may also be requests that were not scheduled in the iteration: a request that waits for KV from the
    host has adopted its local hits too.
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
    """5. Mark the requests whose prefill should have ended as prefilling again."""
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
    """Undo the iteration of these requests, and return how many registered blocks were evicted."""
    written = {block for one in scheduled for group in one.written for block in group}
    undo = Undo(scheduled, scheduler, frozenset(scheduler.hashed(written)))
    for step in steps:
        step(undo)
    return len(undo.garbage)
