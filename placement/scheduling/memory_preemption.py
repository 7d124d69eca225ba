"""Preemption: how much memory online requests lack, and which offline requests give it up."""

from collections.abc import Callable, Iterable, Sequence

from placement.scheduling.interface import EngineView, RequestView
from placement.scheduling.latency_model import BatchWork


def online_demand(view: EngineView) -> int:
    """Return how many blocks the online requests of this iteration need in addition to those that they hold.

    A request needs blocks for its whole prompt and one token more, because with blocks for a chunk only it
    could stall between chunks. Waiting requests that get no tokens yet need no blocks. Blocks that a request
    will find in the prefix cache are not known here, so the demand is an upper bound.
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
    """Return the offline requests to preempt for the blocks and slots that online requests lack.

    Requests are taken in the order of `cheapest_first`, until they suffice. A preempted request's blocks
    enter the free queue with the last block first, and keep their hashes. So only the blocks that online
    requests really take are lost, and the request finds the others again when it resumes.
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
    """Return the work of the requests that fit, in their order, into an iteration of `max_tokens`."""
    taken, left = [], max_tokens
    for request in requests:
        tokens = min(request.pending, left)
        if tokens <= 0:
            break
        left -= tokens
        taken.append((tokens, request.computed))
    return BatchWork.of(taken)


def online_requests(view: EngineView) -> tuple[RequestView, ...]:
    """Return the running and then the waiting online requests."""
    return (*(request for request in view.running if not request.offline), *view.online_waiting)


def without(requests: Sequence[RequestView], removed: Iterable[RequestView]) -> tuple[RequestView, ...]:
    keys = {request.key for request in removed}
    if not keys:
        return tuple(requests)
    return tuple(request for request in requests if request.key not in keys)
