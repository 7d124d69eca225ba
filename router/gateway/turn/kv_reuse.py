"""Counts of KV that later turns could not reuse, because their prefix broke or their conversation moved.

A prefix is broken when a prompt does not continue the tokens of its conversation's KV. The hash chains over
messages show what a client changed. If they show no change, but the engine did not find the KV of the last
answer, the answer's text was tokenised differently. docs/operate.md says what to do about each cause.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum

from router import metrics
from router.directory.api.cache import Asked, Known
from router.gateway.turn.binding import Route
from router.gateway.turn.execution import PrefillLeg
from router.gateway.turn.turn import Turn
from router.http import Observation
from router.identity.prefix_chain import OTHERS, REASONED

log = logging.getLogger("conserve.router.kv_reuse")

_CAUSES_WITH_KV = frozenset({"bound", "redisaggregated", "moved"})  # routes to the decoder that holds the KV


class PrefixBreak(StrEnum):
    """Reason for a broken prefix."""

    CHANGED_TOOLS = "changed_tools"
    EDITED_HISTORY = "edited_history"
    STRIPPED_REASONING = "stripped_reasoning"
    RERENDERED_TOOL_CALL = "rerendered_tool_call"
    RETOKENISED_OUTPUT = "retokenised_output"


@dataclass(frozen=True, slots=True)
class KvReuse:
    """KV that the decoder held for a later turn, and how much of it the turn reused."""

    matched_bytes: int  # length of the prompt's beginning that an earlier request of the conversation had
    held: int  # tokens of the conversation that its decoder held
    generated: int  # how many of them the turn before generated
    cached: int | None  # tokens that the decoder found again; None: it does not report them
    block: int  # tokens of a block; an incomplete block is never found


def find_prefix_break(before: Asked, turn: Turn, reuse: KvReuse) -> tuple[PrefixBreak, int] | None:
    """Return the reason for a broken prefix, and the number of tokens computed again.

    Returns None if the prefix is not broken, or if the engine does not report enough to tell.
    """
    lost = reuse.held if reuse.cached is None else max(0, reuse.held - reuse.cached)
    if before.tools != turn.prompt.tools_digest:
        return PrefixBreak.CHANGED_TOOLS, lost
    links = turn.prompt.chain.links
    answer = turn.prompt.authors[before.messages :].partition(bytes([OTHERS]))[0]  # the assistant's messages
    continues = len(links) > before.messages and links[before.messages - 1] == before.end
    if not (continues and answer):
        if len(links) == before.messages and links[-1] == before.end:
            return None  # a retry
        if reuse.cached is None:
            asked = reuse.held - reuse.generated
            lost -= int(asked * min(1.0, reuse.matched_bytes / max(1, before.size)))
        return PrefixBreak.EDITED_HISTORY, lost
    tokens = min(lost, reuse.generated)
    if lost <= reuse.block or (reuse.cached is not None and lost > reuse.generated + reuse.block):
        return None  # all was found, or the KV of the prompt before was evicted as well
    if before.reasoned and REASONED not in answer:
        return PrefixBreak.STRIPPED_REASONING, tokens
    if reuse.cached is None:
        return None
    return PrefixBreak.RERENDERED_TOOL_CALL if before.called_tool else PrefixBreak.RETOKENISED_OUTPUT, tokens


def record_prefix(
    turn: Turn, matched_bytes: int, known: Known, cause: str, block: int, seen: Observation
) -> tuple[PrefixBreak, int] | None:
    """Count the prefix of a complete turn if it is broken, and remember the turn's prompt for the next turn.

    Returns the reason for a broken prefix and the tokens computed again, or None. Call this before the turn's
    token counts replace those of the turn before.
    """
    before, usage, broken = known.asked, seen.usage, None
    if before is not None and cause in _CAUSES_WITH_KV and known.context_tokens:
        cached = usage.cached_tokens if usage and cause == "bound" else None
        reuse = KvReuse(matched_bytes, known.context_tokens, known.completion_tokens, cached, block)
        broken = find_prefix_break(before, turn, reuse)
        if broken is not None:
            metrics.PREFIX_BROKEN_TOKENS.labels(broken[0]).inc(broken[1])
    known.asked = None
    if turn.prompt.authors:
        chain = turn.prompt.chain
        known.asked = Asked(
            chain.end.link,
            len(chain.links),
            chain.total_bytes,
            turn.prompt.tools_digest,
            seen.reasoned,
            seen.called_tool,
        )
    return broken


def count_move(
    route: Route, prefill: PrefillLeg, seen: Observation, *, answered: bool, same_prefix: bool
) -> None:
    """Count a turn whose conversation moved to another decoder, and tokens computed again because of it.

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
    """Return how many tokens were computed again, on either decoder, because a conversation moved.

    The former decoder held KV of `held` tokens. An incomplete block is computed again in any turn, and does
    not count. `cached`: tokens that the new decoder had or received; None if it does not report them.
    """
    found = 0 if prefill.done_at is None else prefill.cached_tokens
    if cached is not None:
        found = min(found, cached)
    return max(0, held // block * block - found)
