"""Restore of layers: an engine fetches its KV from the other members, and has its whole model again.

The parameters come from the engine's own copy on the host. The engine stands still until they are back. It
needs no agreement of the others, but waits for them, because they fetch their KV here.
"""

import logging
import time

from workers.engine.compat import split_runner as internals
from workers.engine.overload.orders import RestoreOrder
from workers.engine.overload.split.engine_split import EngineSplit
from workers.engine.overload.split.exchange import KvExchange
from workers.engine.overload.split.membership import Membership, SplitPhase
from workers.engine.overload.split.peer_link import PeerError

logger = logging.getLogger("conserve.workers.overload")


class LayerRestore:
    """Carries out restore orders, in the worker's thread with the device lock held."""

    def __init__(self, split: EngineSplit, exchange: KvExchange) -> None:
        self._split, self._exchange = split, exchange

    def run(self, order: RestoreOrder, member: Membership, began: float) -> str:
        """Restore layers. Return an empty string, or why KV was lost; the model is whole in both cases."""
        split = self._split
        # Blocks get their new numbers here. Members know the old ones until they are done.
        if order.moves:
            internals.rename_blocks(split.runner, order.moves)
            split.kv.move(member.kept, order.moves)
        old = {new: old for old, new in order.moves.items()}
        try:
            with split.device.released(), member.until(began + split.limits.order_s):
                self._exchange.take(member, {block: old.get(block, block) for block in order.used})
        except PeerError as error:
            split.lose(member, error)
            return str(error)
        split.enter(SplitPhase.TAKEN)
        with split.device.released(), member.until(time.monotonic() + split.limits.order_s):
            for part in member.others:
                try:
                    member.meet(part, SplitPhase.TAKEN)
                except (
                    PeerError
                ) as error:  # this member has gone on or is late; the next may still need its KV
                    logger.info("member %d of epoch %d did not wait: %s", part, member.epoch, error)
        split.make_whole(member)
        return ""
