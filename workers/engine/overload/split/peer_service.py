"""Peer service: answers the requests of other members in threads of the peer server."""

from collections.abc import Callable

from workers.engine.overload.split.engine_split import EngineSplit
from workers.engine.overload.split.membership import Membership, SplitPhase
from workers.engine.overload.split.passes import SplitPasses
from workers.engine.overload.split.peer_link import Message, MessageKind, PeerRefused


class PeerService:
    """Service that checks that a peer's request belongs to the current split, and carries it out."""

    def __init__(self, split: EngineSplit, passes: SplitPasses) -> None:
        self._split, self._passes = split, passes

    def answer(self, message: Message) -> Message:
        handlers: dict[MessageKind, Callable[[Message], Message]] = {
            MessageKind.MEET: self.meet,
            MessageKind.PUT: self.put,
            MessageKind.GET: self.get,
            MessageKind.RUN: self.run,
        }
        return handlers[message.kind](message)

    def meet(self, message: Message) -> Message:
        """Wait for the phase that a message names, and return the facts that members compare."""
        member = self._split.wait_for(message, SplitPhase(message.values["phase"]))
        if message.values.get("members") != list(member.members):
            raise PeerRefused(f"epoch {message.epoch} has other members here")
        member.sender(message)
        known = {
            "layout": self._split.layout(),
            "part": member.part,
            "blocks": self._split.most_blocks(member),
        }
        return Message(MessageKind.DONE, message.epoch, known)

    def put(self, message: Message) -> Message:
        """Store the KV of the sender's blocks that a message brings for one layer."""
        member = self._split.wait_for(message, SplitPhase.OPEN)
        layer, rows = self._kept_layer(member, message), self._rows(member, message)
        with self._split.device_for(member):
            self._split.kv.write(layer, rows, message.tensors[0])
            self._split.finish_launched_work()
        return Message(MessageKind.DONE, message.epoch)

    def get(self, message: Message) -> Message:
        """Return the KV of the sender's blocks that a message names for one layer."""
        member = self._split.wait_for(message, SplitPhase.SPLIT)
        layer, rows = self._kept_layer(member, message), self._rows(member, message)
        with self._split.device_for(member):
            kv = self._split.kv.read(layer, rows).to("cpu")
        return Message(MessageKind.DONE, message.epoch, {}, [kv])

    def run(self, message: Message) -> Message:
        """Compute the sender's batch through the layers that are kept here."""
        member = self._split.wait_for(message, SplitPhase.SPLIT)
        first_row = self.first_row(member, message)
        with self._split.device_for(member):
            return self._passes.serve(member, message, first_row)

    def first_row(self, member: Membership, message: Message) -> int:
        """Return the first row of the sender's region in the layers kept here."""
        return member.region(member.sender(message))

    def _rows(self, member: Membership, message: Message) -> list[int]:
        first_row = self.first_row(member, message)
        return [block + first_row for block in member.blocks_of(message)]

    def _kept_layer(self, member: Membership, message: Message) -> int:
        layer = int(message.values["layer"])
        if layer not in member.kept:
            raise PeerRefused(f"layer {layer} is not kept here")
        return layer
