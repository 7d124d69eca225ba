"""Negative controls: each leaves out one thing that a split needs, or is slow at it."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from workers.overload.channel import Message
from workers.overload.membership import Membership, SplitPhase
from workers.overload.memory import LayerWeights
from workers.overload.split import SplitModel


class WithoutRegions(SplitModel):
    """A peer's blocks are where this engine's are."""

    def offset(self, member: Membership, part: int) -> int:
        return 0


class InOneRegion(SplitModel):
    """Blocks of all peers are behind this engine's own, as a pair's are."""

    def offset(self, member: Membership, part: int) -> int:
        return member.blocks


class WithoutExchange(SplitModel):
    """KV of the layers that are dropped stays where it is not wanted any more."""

    def give(self, member: Membership, used: Sequence[int]) -> None:
        return


class WithoutWaiting(SplitModel):
    """A batch reads KV of the prefix cache that is on its way still."""

    def give_first(self, member: Membership) -> None:
        return


class WithoutEpochs(SplitModel):
    """A message of a split that is over is taken for one of this."""

    def wait_for(self, message: Any, phase: SplitPhase) -> Membership:
        assert self.member is not None
        return self.member


class SlowToAnswer(SplitModel):
    """Each piece of KV takes its time, and none of them too long."""

    slow_s = 4.0

    def put(self, message: Message) -> Message:
        time.sleep(self.slow_s)
        return super().put(message)

    def get(self, message: Message) -> Message:
        time.sleep(self.slow_s)
        return super().get(message)


class WithoutClosingUp(SplitModel):
    """Pools are smaller, and what is in members' regions stays where it was."""

    def close_up(self, member: Membership) -> None:
        member.blocks = self.whole_blocks
        self.kv.resize(member.kept, member.rows)
        self.bind_rows(member.rows)


MODELS = {
    one.__name__: one
    for one in (
        WithoutRegions,
        InOneRegion,
        WithoutExchange,
        WithoutWaiting,
        WithoutEpochs,
        WithoutClosingUp,
        SlowToAnswer,
    )
}


class SkipsALayer(LayerWeights):
    def bring_back(self, index: int) -> bool:
        if index % 2:
            return super().bring_back(index)
        pages = self.ranges[index]  # there is memory, and something else in it
        pages.resize(pages.tensor.nbytes)
        pages.tensor.view(torch.float32).normal_()
        return True


class SlowToReturn(LayerWeights):
    """Each layer takes its time to come back."""

    slow_s = 0.4

    def bring_back(self, index: int) -> bool:
        time.sleep(self.slow_s)
        return super().bring_back(index)
