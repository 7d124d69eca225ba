"""Drop and restore of layers, in the worker's thread with the device lock held.

In a drop, an engine gives up the layers that other members keep, and sends their KV to these members. All
members carry out the order in an iteration of their own, and meet, so that none begins a phase before the
others. Until every member has received the KV, a fault leaves all engines with their whole models and all KV.

In a restore, an engine fetches its KV from the other members, and copies the dropped parameters from its own
copy on the host. The engine stands still meanwhile. It needs no agreement of the other members, but waits for
them before it gives up its rows, because they fetch their KV from it.
"""

import logging
import time
from typing import Any

from workers.engine.compat import split_runner as internals
from workers.engine.overload.orders import DropOrder, RestoreOrder
from workers.engine.overload.split.engine_split import EngineSplit
from workers.engine.overload.split.exchange import KvExchange
from workers.engine.overload.split.membership import Membership, PeerSettings, SplitPhase
from workers.engine.overload.split.peer_link import PeerError

logger = logging.getLogger("conserve.workers.overload")


def drop_layers(
    split: EngineSplit, exchange: KvExchange, settings: PeerSettings, order: DropOrder, began: float
) -> str:
    """Drop layers, and return an empty string, or the reason why the engine keeps its whole model."""
    if order.epoch <= split.last_epoch:
        return f"epoch {split.last_epoch} was later"
    member = Membership.from_order(order, len(split.weights))
    end = began + split.limits.order_s
    try:
        with split.device.released(), member.until(end):
            _meet(split, member, settings)
        split.share(member, order.used)
        split.enter(SplitPhase.OPEN)
        with split.device.released(), member.until(end):
            exchange.give(member)
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


def _meet(split: EngineSplit, member: Membership, settings: PeerSettings) -> None:
    """Wait for all members, compare their layouts and parts, and agree on the size of the pools."""
    split.begin(member)
    member.connect(settings, split.limits)
    offers = [split.most_blocks(member)]
    for part in member.others:
        theirs: Any = member.meet(part, SplitPhase.MEETING).values
        if theirs.get("layout") != split.layout() or theirs.get("part") != part:
            raise PeerError(f"{member.members[part]} has another model, other blocks, or another part")
        offers.append(int(theirs["blocks"]))
    member.blocks = min(offers)
    if member.blocks <= split.whole_blocks:
        raise PeerError(f"no gain: {member.blocks} blocks, and {split.whole_blocks} with the whole model")


def restore_layers(
    split: EngineSplit, exchange: KvExchange, order: RestoreOrder, member: Membership, began: float
) -> str:
    """Restore the whole model, and return an empty string, or the reason why KV was lost."""
    # Blocks get their new numbers here, but the other members know them by the old numbers.
    if order.moves:
        internals.rename_blocks(split.runner, order.moves)
        split.kv.move(member.kept, order.moves)
    old = {new: old for old, new in order.moves.items()}
    try:
        with split.device.released(), member.until(began + split.limits.order_s):
            exchange.take(member, {block: old.get(block, block) for block in order.used})
    except PeerError as error:
        split.lose(member, error)
        return str(error)
    split.enter(SplitPhase.TAKEN)
    with split.device.released(), member.until(time.monotonic() + split.limits.order_s):
        for part in member.others:
            try:
                member.meet(part, SplitPhase.TAKEN)
            except PeerError as error:  # the member is ahead or late, but the next may still fetch its KV
                logger.info("member %d of epoch %d did not wait: %s", part, member.epoch, error)
    split.make_whole(member)
    return ""
