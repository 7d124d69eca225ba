"""Drop of layers: an engine gives up the layers that other members keep, and sends those members their KV.

All members get the order for a step of their own and meet, so that none begins a phase before the others.
Until every member has the KV of requests, a fault leaves all engines with their whole models and all KV.
"""

import logging
from typing import Any

from workers.engine.overload.orders import DropOrder
from workers.engine.overload.split.engine_split import EngineSplit
from workers.engine.overload.split.exchange import KvExchange
from workers.engine.overload.split.membership import Membership, PeerSettings, SplitPhase
from workers.engine.overload.split.peer_link import PeerError

logger = logging.getLogger("conserve.workers.overload")


class LayerDrop:
    """Carries out drop orders, in the worker's thread with the device lock held."""

    def __init__(self, split: EngineSplit, exchange: KvExchange, settings: PeerSettings) -> None:
        self._split, self._exchange, self._settings = split, exchange, settings

    def run(self, order: DropOrder, began: float) -> str:
        """Drop layers. Return an empty string when the engine is split, else the reason why it is not."""
        split = self._split
        if order.epoch <= split.last_epoch:
            return f"epoch {split.last_epoch} was later"
        member = Membership.from_order(order, len(split.weights))
        end = began + split.limits.order_s
        try:
            with split.device.released(), member.until(end):
                self._meet(member)
            split.share(member, order.used)
            split.enter(SplitPhase.OPEN)
            with split.device.released(), member.until(end):
                self._exchange.give(member)
                split.enter(SplitPhase.GIVEN)
                for part in member.others:
                    member.meet(part, SplitPhase.GIVEN)
        except (PeerError, MemoryError, RuntimeError) as error:  # RuntimeError: torch finds no memory
            if not isinstance(error, PeerError):
                logger.exception("drop failed epoch=%d", order.epoch)
            split.make_whole(member)
            return str(error)
        split.kv.forget_host()
        split.enter(SplitPhase.SPLIT)
        return ""

    def _meet(self, member: Membership) -> None:
        """Wait for all members, compare their parts, and agree on the size of the pools."""
        split = self._split
        split.begin(member)
        member.connect(self._settings, split.limits)
        offers = [split.most_blocks(member)]
        for part in member.others:
            theirs: Any = member.meet(part, SplitPhase.MEETING).values
            if theirs.get("layout") != split.layout() or theirs.get("part") != part:
                raise PeerError(f"{member.members[part]} has another model, other blocks, or another part")
            offers.append(int(theirs["blocks"]))
        member.blocks = min(offers)
        if member.blocks <= split.whole_blocks:
            raise PeerError(f"no gain: {member.blocks} blocks, and {split.whole_blocks} with the whole model")
