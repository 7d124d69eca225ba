"""Undoing an aborted iteration: five steps after which the scheduler is as it was before the iteration.

vLLM advances `num_computed_tokens` and registers blocks in the prefix cache *before* the model runs. When
the model then leaves early, both are lies: later requests would attend to blocks that nobody computed.
Leaving any step out corrupts outputs or bookkeeping silently; the tests leave out each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A row of the iteration, noted right after it was scheduled."""

    request: Any
    tokens: int  # scheduled
    start: int  # tokens computed before
    written: tuple[tuple[int, ...], ...]  # ids of the blocks it writes, by KV cache group
    not_its_to_register: tuple[int, ...]  # full blocks before `start`, or adopted as prefix hits, by group
    admitted: bool  # it entered the batch with this iteration, and may have taken prefix hits


class Bookkeeping(Protocol):
    """What the roll-back needs of vLLM's scheduler (vllm_contact.py implements it)."""

    def is_running(self, request: Any) -> bool: ...

    def hashed(self, block_ids: set[int]) -> set[int]: ...

    def evict(self, block_ids: set[int]) -> None: ...

    def limit_registered(self, request: Any, blocks_by_group: tuple[int, ...]) -> None: ...

    def first_block_in(self, request: Any, block_ids: set[int], before: int | None) -> int | None: ...

    def waiting_holders(self) -> list[Any]: ...

    def mark_prefilling(self, request: Any, prefilling: bool) -> None: ...

    @property
    def block_tokens(self) -> int: ...


@dataclass(slots=True)
class Undo:
    """The iteration to undo, and what earlier steps found for later ones."""

    rows: tuple[ScheduledRow, ...]
    books: Bookkeeping
    garbage: frozenset[int] = frozenset()  # registered blocks that the iteration was to write

    def running(self) -> list[ScheduledRow]:
        """Rows still there: a client may have hung up while the iteration ran."""
        return [row for row in self.rows if self.books.is_running(row.request)]


def rewind_computed(undo: Undo) -> None:
    """1. No row computed anything."""
    for row in undo.running():
        row.request.num_computed_tokens = row.start


def evict_written(undo: Undo) -> None:
    """2. Nobody may find the blocks again, also those of rows that have ended meanwhile."""
    undo.books.evict(set(undo.garbage))


def rewind_registered(undo: Undo) -> None:
    """3. Rows register these blocks again when they really are computed.

    Only those that are theirs: a block that was adopted is registered by the row it was adopted from, though
    its adopter may have to compute it too (step 4). vLLM does not accept the same block twice.
    """
    for row in undo.running():
        undo.books.limit_registered(row.request, row.not_its_to_register)


def truncate_sharers(undo: Undo) -> None:
    """4. Requests admitted in the same step that took such a block as a prefix hit compute it themselves.

    They may not be rows: one that waits for KV from the host took its local hits in this step too.
    """
    garbage = set(undo.garbage)
    if not garbage:
        return
    books = undo.books
    admitted = [(row.request, max(row.not_its_to_register)) for row in undo.running() if row.admitted]
    for request, before in [*admitted, *((request, None) for request in books.waiting_holders())]:
        first = books.first_block_in(request, garbage, before)
        if first is not None:
            limit = first * books.block_tokens
            request.num_computed_tokens = min(request.num_computed_tokens, limit)


def restore_prefill_marks(undo: Undo) -> None:
    """5. Rows that were to finish their prefill are prefilling still."""
    for row in undo.running():
        undo.books.mark_prefilling(row.request, row.request.num_tokens - row.request.num_computed_tokens > 1)


Step = Callable[[Undo], None]
STEPS: tuple[Step, ...] = (
    rewind_computed,
    evict_written,
    rewind_registered,
    truncate_sharers,
    restore_prefill_marks,
)


def roll_back(rows: tuple[ScheduledRow, ...], books: Bookkeeping, steps: tuple[Step, ...] = STEPS) -> int:
    """Undoes the iteration of `rows`; returns how many registered blocks it had to disown."""
    written = {block for row in rows for group in row.written for block in group}
    undo = Undo(rows, books, frozenset(books.hashed(written)))
    for step in steps:
        step(undo)
    return len(undo.garbage)
