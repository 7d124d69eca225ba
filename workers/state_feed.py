"""What a keeper and its control service need of the engine's feed."""

from typing import Protocol

from workers.board import Board


class StateFeed(Protocol):
    async def follow(self, board: Board) -> None:
        """Put the engine's states on the board until cancelled; bridge interruptions."""

    async def release(self, conversation: str) -> bool:
        """Forget the KV of a conversation that ended; says whether the engine held any."""

    async def park(self, conversation: str) -> bool:
        """Move a conversation's KV to the host now; says whether the engine held any."""

    async def drain(self, on: bool) -> None:
        """Take no new conversations (or take them again); running turns go on."""


class FeedUnavailable(Exception):
    """The engine does not listen at present."""
