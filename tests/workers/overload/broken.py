"""Broken variants of layer sharing: each leaves out a necessary part, or answers slowly."""

import time
from typing import Any

import torch

from workers.engine.overload.pages.layer_memory import LayerWeights
from workers.engine.overload.split.engine_split import EngineSplit
from workers.engine.overload.split.exchange import KvExchange
from workers.engine.overload.split.membership import Membership, SplitPhase
from workers.engine.overload.split.peer_link import Message
from workers.engine.overload.split.peer_service import PeerService
from workers.engine.overload.split.split_model import SplitModel


class WithoutRegions(PeerService):
    """Peer service that treats a peer's blocks as this engine's own."""

    def first_row(self, member: Membership, message: Message) -> int:
        return 0


class InOneRegion(PeerService):
    """Peer service that puts the blocks of all peers into one region, which is right only for a pair."""

    def first_row(self, member: Membership, message: Message) -> int:
        return member.blocks


class SlowToAnswer(PeerService):
    """Peer service that waits for `slow_s` before it handles a message with KV."""

    slow_s = 4.0

    def put(self, message: Message) -> Message:
        time.sleep(self.slow_s)
        return super().put(message)

    def get(self, message: Message) -> Message:
        time.sleep(self.slow_s)
        return super().get(message)


class WithoutExchange(KvExchange):
    """KV exchange that does not send the KV of dropped layers to the members that keep these layers."""

    def give(self, member: Membership) -> None:
        return


class WithoutEpochs(EngineSplit):
    """Split that accepts a message of an earlier split."""

    def wait_for(self, message: Any, phase: SplitPhase) -> Membership:
        assert self.member is not None
        return self.member


class WithAPartOfTheWeights(LayerWeights):
    """Weights that restore only every other layer, so that the remaining layers have wrong content."""

    def restore(self, layers: Any) -> None:
        missing = [index for index in layers if index % 2 and not self.ranges[index].mapped_bytes]
        super().restore(index for index in layers if index not in missing)
        for index in missing:
            pages = self.ranges[index]
            pages.resize(pages.tensor.nbytes)
            pages.tensor.view(torch.float32).normal_()


BROKEN = (
    *(WithoutRegions, InOneRegion, SlowToAnswer, WithoutExchange),
    *(WithoutEpochs, WithAPartOfTheWeights),
)


def mend(model: SplitModel) -> None:
    model.service.__class__ = PeerService
    model.exchange.__class__ = KvExchange
    model.split.__class__ = EngineSplit
    model.split.weights.__class__ = LayerWeights


def break_with(model: SplitModel, name: str) -> None:
    """Make the model wrong in the named way; an empty name makes it right again."""
    mend(model)
    for one in (model.service, model.exchange, model.split, model.split.weights):
        for broken in BROKEN:
            if broken.__name__ == name and isinstance(one, broken.__base__):  # type: ignore[arg-type]
                one.__class__ = broken  # type: ignore[assignment]
