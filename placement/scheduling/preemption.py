"""Preemption: the memory that online requests need now, and the offline requests that give it up."""

from collections.abc import Callable, Iterable, Sequence

from placement.scheduling.interface import EngineView, RequestView
from placement.scheduling.latency_model import BatchWork


def online_demand(view: EngineView) -> int:
    """Return the number of missing blocks for the online requests of this iteration.

    A request asks for its whole prompt and one token more: admitted for its first chunk only, it would stall
    between chunks. Waiting requests that get no tokens yet ask for nothing. Blocks that a request will find
    in the prefix cache are not known here, so the demand is an upper bound.
    """
    need, tokens_left, block_tokens = 0, view.max_tokens, view.block_tokens
    for request in online_requests(view):
        if tokens_left <= 0:
            break
        tokens_left -= request.pending
        lacking = -(-(request.tokens + 1) // block_tokens) - request.blocks
        if lacking > 0:
            need += lacking
    return need


def victims(
    view: EngineView, cheapest_first: Callable[[RequestView], tuple[float, ...]]
) -> tuple[RequestView, ...]:
    """Return the fewest running offline requests to preempt for the blocks and slots that online work lacks.

    A request's blocks enter the free queue tail first and keep their hashes. So only those that online work
    really takes are lost, and the request finds the rest again when it resumes.
    """
    offline = [request for request in view.running if request.offline]
    if not offline:
        return ()
    lacking = online_demand(view) - view.free_blocks
    slots = len(view.running) + len(view.online_waiting) - view.max_running
    chosen: list[RequestView] = []
    for request in sorted(offline, key=cheapest_first):
        if lacking <= 0 and slots <= 0:
            break
        if slots <= 0 and request.blocks == 0:
            continue
        chosen.append(request)
        lacking -= request.blocks
        slots -= 1
    return tuple(chosen)


def online_work(requests: Iterable[RequestView], max_tokens: int) -> BatchWork:
    """Return the work of these online requests, in order, in an iteration of at most `max_tokens`."""
    taken, left = [], max_tokens
    for request in requests:
        tokens = min(request.pending, left)
        if tokens <= 0:
            break
        left -= tokens
        taken.append((tokens, request.computed))
    return BatchWork.of(taken)


def online_requests(view: EngineView) -> tuple[RequestView, ...]:
    return (*(request for request in view.running if not request.offline), *view.online_waiting)


def without(requests: Sequence[RequestView], removed: Iterable[RequestView]) -> tuple[RequestView, ...]:
    keys = {request.key for request in removed}
    if not keys:
        return tuple(requests)
    return tuple(request for request in requests if request.key not in keys)
