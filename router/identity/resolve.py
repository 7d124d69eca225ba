"""What a known prefix means: the same conversation going on, a retry of it, or a fork."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from router.identity.nodes import Found


class How(StrEnum):
    EXPLICIT = "explicit"  # the request names its conversation
    CONTINUED = "continued"  # it goes on from the newest request of a conversation
    RETRIED = "retried"  # it repeats the newest request, which is not running any more
    FORKED = "forked"  # it goes on from an older point, or repeats a request that is still running
    NEW = "new"  # nothing of it is known


@dataclass(frozen=True, slots=True)
class Resolved:
    how: How
    conversation: str | None  # None: a new one is to be made
    parent: str | None  # whose decoder a fork starts on
    known_bytes: int  # of the prompt, up to the known prefix


def resolve(found: Found | None, end_digest: bytes, running: Callable[[str], bool]) -> Resolved:
    """`running` says whether a conversation has a turn in flight."""
    if found is None:
        return Resolved(How.NEW, None, None, 0)
    tips = [holder.conversation for holder in found.holders if holder.tip]
    idle = [conversation for conversation in tips if not running(conversation)]
    if found.digest == end_digest:
        if idle:
            return Resolved(How.RETRIED, idle[0], None, found.size)
    elif tips:
        return Resolved(How.CONTINUED, (idle or tips)[0], None, found.size)
    return Resolved(How.FORKED, None, found.holders[0].conversation, found.size)
