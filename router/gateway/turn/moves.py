"""Counts moves of conversations, and whether their KV came with them."""

import logging

from router import metrics
from router.gateway.turn.binding import Route
from router.gateway.turn.execution import PrefillLeg
from router.http import Observation

log = logging.getLogger("conserve.router.moves")


def count_move(
    route: Route, prefill: PrefillLeg, seen: Observation, *, answered: bool, same_prefix: bool
) -> None:
    """Count a turn whose conversation moved, and the context tokens that were computed again.

    Call this before the turn's token counts replace those of the turn before. A changed prefix is computed
    again wherever the conversation is, and does not count.
    """
    if not answered:
        metrics.MOVED.labels(route.moved, "unfinished").inc()
        return
    cached = seen.usage.cached_tokens if seen.usage is not None else None
    held = route.known.context_tokens - route.known.completion_tokens
    tokens = recomputed_tokens(held, route.decoder.block_tokens, prefill, cached) if same_prefix else 0
    metrics.MOVED.labels(route.moved, "recomputed" if tokens else "with_kv").inc()
    if tokens:
        metrics.MOVED_RECOMPUTED_TOKENS.inc(tokens)
        metrics.FALLBACKS.labels("move_recomputed").inc()
        log.warning(
            "moved without its KV conversation=%s engine=%s recomputed=%d",
            *(route.known.key, route.decoder.engine, tokens),
        )


def recomputed_tokens(held: int, block: int, prefill: PrefillLeg, cached: int | None) -> int:
    """Return how many tokens of a moved context were computed again, by the former decoder or the new one.

    `held` tokens were computed before; an incomplete block is computed again in any turn. `cached` is what
    the new decoder had or received, None if it does not say.
    """
    found = 0 if prefill.done_at is None else prefill.cached_tokens
    if cached is not None:
        found = min(found, cached)
    return max(0, held // block * block - found)
