"""The same workload faster, longer, with other waits, or cut to what fits."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from traces.format import Conversation, TraceError, Turn


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors. A rate of 2 halves every gap between arrivals: the pattern stays."""

    rate: float = 1.0
    lengths: float = 1.0
    waits: float = 1.0
    wait_cap_s: float = float("inf")  # after scaling: people who come back the next day


def scale(conversations: Iterable[Conversation], by: Scale) -> Iterator[Conversation]:
    if by.rate <= 0.0 or by.lengths <= 0.0 or by.waits < 0.0 or by.wait_cap_s < 0.0:
        raise TraceError(f"cannot scale by {by}: rate and lengths must be above 0, waits not below it")
    for conversation in conversations:
        yield replace(
            conversation,
            arrival_s=round(conversation.arrival_s / by.rate, 6),
            turns=tuple(_turns(conversation.turns, by)),
        )


def _turns(turns: tuple[Turn, ...], by: Scale) -> Iterator[Turn]:
    """A turn that went on from the whole context still does; otherwise its cached part scales too."""
    old_context = new_context = new_largest = 0
    for index, turn in enumerate(turns):
        whole = index > 0 and turn.cached_tokens == old_context
        cached = new_context if whole else int(turn.cached_tokens * by.lengths)
        if index:
            cached = min(cached, new_largest)
        scaled = replace(
            turn,
            appended_tokens=_tokens(turn.appended_tokens, by.lengths),
            cached_tokens=cached,
            output_tokens=_tokens(turn.output_tokens, by.lengths),
            wait_s=round(min(turn.wait_s * by.waits, by.wait_cap_s), 6),
            served_s=turn.served_s if by.lengths == 1.0 else None,
        )
        if scaled.prompt_tokens == 0:
            scaled = replace(scaled, appended_tokens=1)
        old_context, new_context = turn.context_tokens, scaled.context_tokens
        new_largest = max(new_largest, new_context)
        yield scaled


def _tokens(count: int, factor: float) -> int:
    return max(1, round(count * factor)) if count else 0


def fit(
    conversations: Iterable[Conversation], max_context: int, max_turns: int | None = None
) -> Iterator[Conversation]:
    """Each conversation up to the first turn that does not fit; left out where that is its first."""
    for conversation in conversations:
        kept: list[Turn] = []
        for turn in conversation.turns[:max_turns]:
            if turn.context_tokens > max_context:
                break
            kept.append(turn)
        if kept:
            yield replace(conversation, turns=tuple(kept))


def rebased(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """The first arrival becomes 0."""
    start: float | None = None
    for conversation in conversations:
        start = conversation.arrival_s if start is None else start
        yield replace(conversation, arrival_s=round(conversation.arrival_s - start, 6))
