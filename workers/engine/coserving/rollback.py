"""Undoing an aborted iteration: five steps after which the scheduler is as it was before the iteration.

vLLM advances `num_computed_tokens` and registers blocks in the prefix cache *before* the model runs. When
the model then leaves early, both are lies: later requests would attend to blocks that nobody computed.
Leaving any step out corrupts outputs or bookkeeping silently; the tests leave out each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.compat.coserving_scheduler import OpenScheduler, is_running
from workers.engine.coserving.iterations import ScheduledRequest


@dataclass(slots=True)
class Undo:
    """The iteration to undo, and what earlier steps found for later ones."""

    scheduled: tuple[ScheduledRequest, ...]
    scheduler: OpenScheduler
    garbage: frozenset[int] = frozenset()  # registered blocks that the iteration was to write

    def running(self) -> list[ScheduledRequest]:
        """Requests still there: a client may have hung up while the iteration ran."""
        return [one for one in self.scheduled if is_running(one.request)]


def rewind_computed(undo: Undo) -> None:
    """1. No request computed anything, and none has a token on its way: no other step was in flight."""
    for one in undo.running():
        one.request.num_computed_tokens = one.start
        one.request.num_output_placeholders = 0


def evict_written(undo: Undo) -> None:
    """2. Nobody may find the blocks again, also those of requests that have ended meanwhile."""
    undo.scheduler.kv_cache_manager.evict_blocks(set(undo.garbage))


def rewind_registered(undo: Undo) -> None:
    """3. Requests register these blocks again when they really are computed.

    Only those that are theirs: a block that was adopted is registered by the request it was adopted from,
    though its adopter may have to compute it too (step 4). vLLM does not accept the same block twice.
    """
    for one in undo.running():
        undo.scheduler.limit_registered(one.request, one.not_its_to_register)


def truncate_sharers(undo: Undo) -> None:
    """4. Requests admitted in the same step that took such a block as a prefix hit compute it themselves.

    They need not be scheduled: one that waits for KV from the host took its local hits in this step too.
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
    """5. Requests that were to finish their prefill are prefilling still."""
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
    """Undoes the iteration of these requests; returns how many registered blocks it had to disown."""
    written = {block for one in scheduled for group in one.written for block in group}
    undo = Undo(scheduled, scheduler, frozenset(scheduler.hashed(written)))
    for step in steps:
        step(undo)
    return len(undo.garbage)
