"""The keeper's line to its engine: states onto the board, commands to the connector; it reconnects."""

import asyncio
import logging
from pathlib import Path

from kvtransfer.feed import EngineFeed, FeedError
from workers.board import Board
from workers.state_feed import FeedUnavailable

log = logging.getLogger("conserve.workers.feed")

RETRY_S = 0.5


class ConnectorFeed:
    def __init__(self, engine: str, socket: Path) -> None:
        self._engine, self._socket = engine, socket
        self._feed: EngineFeed | None = None
        self._draining = False

    async def follow(self, board: Board) -> None:
        """Until cancelled. An engine that restarts or a line that breaks is met by connecting again."""
        said = ""
        while True:
            try:
                async with EngineFeed(self._socket) as feed:
                    if self._draining:  # an adopted or restarted engine does not know it
                        await feed.drain()
                    self._feed = feed
                    async for state in feed.states():
                        board.engine_state(state)
                ended = "it ended"
            except (OSError, FeedError) as error:
                ended = str(error)
            finally:
                self._feed = None
            if ended != said:
                said = ended
                log.warning("no state feed engine=%s reason=%r", self._engine, ended)
            await asyncio.sleep(RETRY_S)

    async def release(self, conversation: str) -> bool:
        try:
            return await self._connected().release(conversation)
        except FeedError as error:
            raise FeedUnavailable(str(error)) from error

    async def park(self, conversation: str) -> bool:
        try:
            return await self._connected().park(conversation)
        except FeedError as error:
            raise FeedUnavailable(str(error)) from error

    async def drain(self, on: bool) -> None:
        self._draining = on
        try:
            await self._connected().drain(on)
        except FeedError as error:
            raise FeedUnavailable(str(error)) from error

    def _connected(self) -> EngineFeed:
        if self._feed is None:
            raise FeedUnavailable(f"engine {self._engine} does not listen at present")
        return self._feed
