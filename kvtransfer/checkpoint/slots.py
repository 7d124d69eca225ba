"""Host memory for blocks: one row a slot, with what must be in it."""

import numpy as np
import xxhash

from kvtransfer.checkpoint.movers import Piece
from kvtransfer.checkpoint.orders import Copy


class HostSlots:
    """Rows are plain memory, used page by page as slots fill.

    The digest is of the bytes as they came, before they are in the rows, and what is checked is the copy that
    goes back: whenever a row changes in between, it is found.
    """

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.rows: Piece = np.empty((slots, block_bytes), dtype=np.uint8)
        self._contents: dict[int, tuple[int, int]] = {}  # slot -> generation, digest

    def put(self, copies: list[Copy], piece: Piece) -> None:
        digests = _digests(piece)
        self.rows[[copy.slot for copy in copies]] = piece
        for copy, digest in zip(copies, digests, strict=True):
            self._contents[copy.slot] = copy.generation, digest

    def take(self, copies: list[Copy], bounce: Piece) -> list[Copy]:
        """Those whose slots hold what they should; the first rows of `bounce` get their bytes."""
        known = [c for c in copies if self._contents.get(c.slot, (None, 0))[0] == c.generation]
        if not known:
            return []
        piece = self._gather(known, bounce)
        digests = _digests(piece)
        good = [n for n, copy in enumerate(known) if self._contents[copy.slot][1] == digests[n]]
        if len(good) < len(known):
            piece[: len(good)] = piece[good]
        return [known[n] for n in good]

    def _gather(self, copies: list[Copy], bounce: Piece) -> Piece:
        slots = [copy.slot for copy in copies]
        return np.take(self.rows, slots, axis=0, out=bounce[: len(slots)], mode="clip")


def _digests(piece: Piece) -> list[int]:
    """One for each block."""
    return [xxhash.xxh3_64_intdigest(block.data) for block in piece]
