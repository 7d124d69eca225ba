"""Exchange of KV between the members of a split, while their engines do not step."""

import time
from collections.abc import Mapping, Sequence

import torch

from workers.engine.overload.pages.layer_memory import ROWS_PER_MESSAGE, ReservedKv
from workers.engine.overload.split.membership import Membership
from workers.engine.overload.split.peer_link import Message, MessageKind


class KvExchange:
    """Moves KV of dropped layers between the host and the members that keep the layers."""

    def __init__(self, kv: ReservedKv) -> None:
        self._kv = kv
        self._moved_bytes, self._moved_s = 0, 0.0
        self._asked: set[int] = set()

    def give(self, member: Membership) -> None:
        """Send KV from the host to the members that keep its layers."""
        for part, layer in member.keepers:
            for rows, values in self._kv.on_host[layer]:
                self._request(member, part, MessageKind.PUT, layer, rows, [values])

    def take(self, member: Membership, used: Mapping[int, int]) -> None:
        """Fetch blocks to the host. `used` maps current block numbers to those that members know."""
        blocks = list(used.items())
        for part, layer in member.keepers:
            for at in range(0, len(blocks), ROWS_PER_MESSAGE):
                rows, known = map(list, zip(*blocks[at : at + ROWS_PER_MESSAGE], strict=True))
                answer = self._request(member, part, MessageKind.GET, layer, known, [])
                self._kv.on_host[layer].append((rows, answer.tensors[0]))

    def take_moved(self) -> tuple[int, float]:
        """Return the bytes moved and the seconds taken since the last call.

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
