"""Memory that online rows need now, and the offline rows that give it."""

from collections.abc import Callable, Iterable, Sequence

from placement.latency import BatchWork
from placement.serving.state import EngineView, Row


def blocks_for(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def online_demand(view: EngineView) -> int:
    """Blocks that the online rows served in this iteration lack.

    A row asks for its whole prompt and one token more: admitted for its first chunk only, it would stall
    between chunks. Waiting rows that get no tokens yet ask for nothing yet. Blocks that a row will find in
    the prefix cache are not known here, so the demand is an upper bound.
    """
    need, tokens_left = 0, view.max_tokens
    for row in online_rows(view):
        if tokens_left <= 0:
            break
        tokens_left -= row.pending
        need += max(blocks_for(row.tokens + 1, view.block_tokens) - row.blocks, 0)
    return need


def slots_wanted(view: EngineView) -> int:
    """Places in the batch that waiting online rows lack."""
    return max(len(view.running) + len(view.online_waiting) - view.max_running, 0)


def victims(view: EngineView, cheapest_first: Callable[[Row], object]) -> tuple[Row, ...]:
    """As few running offline rows as give online work the blocks and places it lacks, cheapest first.

    A row's blocks go to the free queue tail first and keep their hashes, so only those that online work
    really takes are lost to it; the rest it finds again when it resumes.
    """
    lacking = online_demand(view) - view.free_blocks
    places = slots_wanted(view)
    chosen: list[Row] = []
    for row in sorted((r for r in view.running if r.offline), key=cheapest_first):  # type: ignore[arg-type]
        if lacking <= 0 and places <= 0:
            break
        if places <= 0 and row.blocks == 0:
            continue
        chosen.append(row)
        lacking -= row.blocks
        places -= 1
    return tuple(chosen)


def online_work(rows: Iterable[Row], max_tokens: int) -> BatchWork:
    """What the online rows will compute in an iteration of at most `max_tokens`, in the order given."""
    work = BatchWork()
    for row in rows:
        tokens = min(row.pending, max_tokens - work.new_tokens)
        if tokens <= 0:
            break
        work = work.plus(tokens, row.computed)
    return work


def online_rows(view: EngineView) -> tuple[Row, ...]:
    return (*(row for row in view.running if not row.offline), *view.online_waiting)


def without(rows: Sequence[Row], gone: Iterable[Row]) -> tuple[Row, ...]:
    keys = {row.key for row in gone}
    return tuple(row for row in rows if row.key not in keys)
