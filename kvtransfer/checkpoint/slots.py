"""Host memory for blocks: one row a slot and layer, with what must be in it."""

from collections.abc import Sequence

import torch
import xxhash

from kvtransfer.checkpoint.orders import Copy


class HostSlots:
    """Rows are plain memory, used page by page as slots fill.

    The digest is of the bytes as they came, before they are in the rows, and what is checked is the copy that
    goes back: whenever a row changes in between, it is found.
    """

    def __init__(self, device: list[torch.Tensor], slots: int) -> None:
        self.rows = [torch.empty((slots, *layer.shape[1:]), dtype=layer.dtype) for layer in device]
        self._contents: dict[int, tuple[int, int]] = {}  # slot -> generation, digest

    def put(self, copies: list[Copy], pieces: Sequence[torch.Tensor]) -> None:
        digests = _digests(pieces)
        target = torch.tensor([copy.slot for copy in copies])
        for row, piece in zip(self.rows, pieces, strict=True):
            row.index_copy_(0, target, piece)
        for copy, digest in zip(copies, digests, strict=True):
            self._contents[copy.slot] = copy.generation, digest

    def take(self, copies: list[Copy]) -> tuple[list[Copy], list[torch.Tensor]]:
        """Those whose slots hold what they should, and their bytes by layer."""
        known = [c for c in copies if self._contents.get(c.slot, (None, 0))[0] == c.generation]
        pieces = self._gather([copy.slot for copy in known])
        digests = _digests(pieces)
        good = [n for n, copy in enumerate(known) if self._contents[copy.slot][1] == digests[n]]
        if len(good) < len(known):
            pieces = [piece.index_select(0, torch.tensor(good, dtype=torch.long)) for piece in pieces]
        return [known[n] for n in good], pieces

    def _gather(self, slots: list[int]) -> list[torch.Tensor]:
        source = torch.tensor(slots, dtype=torch.long)
        return [row.index_select(0, source) for row in self.rows]


def _digests(pieces: Sequence[torch.Tensor]) -> list[int]:
    """One for each block, over all layers."""
    count = len(pieces[0])
    if not count:
        return []
    layers = [piece.view(count, -1).view(torch.uint8).numpy() for piece in pieces]
    digests = []
    for block in range(count):
        digest = xxhash.xxh3_64()
        for layer in layers:
            digest.update(layer[block].data)
        digests.append(digest.intdigest())
    return digests
