"""Exchange of KV between the members of a split, while their engines compute nothing."""

import time
from collections.abc import Mapping, Sequence

import torch

from workers.engine.overload.pages.layer_memory import ROWS_PER_MESSAGE, ReservedKv
from workers.engine.overload.split.membership import Membership
from workers.engine.overload.split.peer_link import Message, MessageKind


class KvExchange:
    """Exchange of the KV of dropped layers between the host and the members that keep the layers."""

    def __init__(self, kv: ReservedKv) -> None:
        self._kv = kv
        self._moved_bytes, self._moved_s = 0, 0.0
        self._asked: set[int] = set()

    def give(self, member: Membership) -> None:
        """Send the KV of dropped layers from the host to the members that keep these layers."""
        for part, layer in member.keepers:
            for rows, values in self._kv.on_host[layer]:
                self._request(member, part, MessageKind.PUT, layer, rows, [values])

    def take(self, member: Membership, used: Mapping[int, int]) -> None:
        """Fetch the KV of dropped layers from the members that keep these layers to the host.

        `used` maps current block numbers to the numbers that the members know.
        """
        blocks = list(used.items())
        for part, layer in member.keepers:
            for at in range(0, len(blocks), ROWS_PER_MESSAGE):
                rows, known = map(list, zip(*blocks[at : at + ROWS_PER_MESSAGE], strict=True))
                answer = self._request(member, part, MessageKind.GET, layer, known, [])
                self._kv.on_host[layer].append((rows, answer.tensors[0]))

    def take_moved(self) -> tuple[int, float]:
        """Return the bytes that were moved since the last call, and the seconds that this took.

        The first message to each peer is left out, because it also waits for the peer to get ready.
        """
        moved = self._moved_bytes, self._moved_s
        self._moved_bytes, self._moved_s = 0, 0.0
        self._asked.clear()
        return moved

    def _request(
        self,
        member: Membership,
        part: int,
        kind: MessageKind,
        layer: int,
        rows: list[int],
        tensors: Sequence[torch.Tensor],
    ) -> Message:
        began = time.monotonic()
        answer = member.request(part, kind, {"layer": layer, "rows": rows}, tensors)
        if part in self._asked:
            self._moved_bytes += sum(tensor.nbytes for tensor in (*tensors, *answer.tensors))
            self._moved_s += time.monotonic() - began
        self._asked.add(part)
        return answer
