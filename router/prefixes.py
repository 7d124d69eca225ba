"""Broken prefixes: turns whose prompt does not go on with the tokens that their conversation's KV is of.

The chains of messages say what a client changed; what engines say was cached tells the rest: where the
messages are the same and the answer's KV is not found again, the same text has become other tokens. What can
be done about each cause is in docs/operate.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from router import metrics
from router.chains import OTHERS, REASONED
from router.directory.cache import Asked, Known
from router.http import Observation
from router.turn import Turn

_KEPT_CAUSES = frozenset({"bound", "redisaggregated"})  # of a route: the conversation is where its KV is


class BrokenBy(StrEnum):
    CHANGED_TOOLS = "changed_tools"
    EDITED_HISTORY = "edited_history"
    STRIPPED_REASONING = "stripped_reasoning"
    RERENDERED_TOOL_CALL = "rerendered_tool_call"
    RETOKENISED_OUTPUT = "retokenised_output"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a later turn, beside its prompt."""

    matched_bytes: int  # in an earlier request of this conversation
    had: int  # tokens that its decoder held
    generated: int  # of these, by the turn before
    cached: int | None  # that it found again, if it says so
    block: int  # tokens; less than one is never found


def broken_by(before: Asked, turn: Turn, seen: Reuse) -> tuple[BrokenBy, int] | None:
    """Why tokens were computed again, and how many; None where the prefix held, or nobody can know."""
    lost = seen.had if seen.cached is None else max(0, seen.had - seen.cached)
    if before.tools != turn.prompt.tools_digest:
        return BrokenBy.CHANGED_TOOLS, lost
    links = turn.prompt.chain.links
    answer = turn.prompt.marks[before.messages :].partition(bytes([OTHERS]))[0]  # what an assistant wrote
    goes_on = len(links) > before.messages and links[before.messages - 1] == before.end
    if not (goes_on and answer):
        if len(links) == before.messages and links[-1] == before.end:
            return None  # a retry
        if seen.cached is None:
            asked = seen.had - seen.generated
            lost -= int(asked * min(1.0, seen.matched_bytes / max(1, before.size)))
        return BrokenBy.EDITED_HISTORY, lost
    tokens = min(lost, seen.generated)
    if lost <= seen.block or (seen.cached is not None and lost > seen.generated + seen.block):
        return None  # all was found, or the prompt before was not either: its KV was not kept
    if before.reasoned and REASONED not in answer:
        return BrokenBy.STRIPPED_REASONING, tokens
    if seen.cached is None:
        return None
    return BrokenBy.RERENDERED_TOOL_CALL if before.called_tool else BrokenBy.RETOKENISED_OUTPUT, tokens


def note_prefix(
    turn: Turn, matched_bytes: int, known: Known, cause: str, block: int, seen: Observation
) -> None:
    """A turn has ended; before its counts are taken over."""
    before, usage = known.asked, seen.usage
    if before is not None and cause in _KEPT_CAUSES and known.context_tokens:
        cached = usage.cached_tokens if usage and cause == "bound" else None
        later = Reuse(matched_bytes, known.context_tokens, known.completion_tokens, cached, block)
        if (broken := broken_by(before, turn, later)) is not None:
            metrics.PREFIX_BROKEN_TOKENS.labels(broken[0]).inc(broken[1])
    known.asked = None
    if turn.prompt.marks:
        chain = turn.prompt.chain
        known.asked = Asked(
            chain.end.link,
            len(chain.links),
            chain.total_bytes,
            turn.prompt.tools_digest,
            seen.reasoned,
            seen.called_tool,
        )
