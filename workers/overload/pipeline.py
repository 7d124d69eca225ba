"""Passes of a model whose layers are shared: own batches through all parts, and peers' batches through this
engine's part."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.overload import vllm_internals as internals
from workers.overload.channel import Message, PeerAsk, PeerRefused
from workers.overload.exchange import LinkOrder
from workers.overload.membership import DeviceLock, Membership


@dataclass
class SplitTally:
    """Since the engine's start."""

    passes: int = 0  # own batches that went through peers
    served: int = 0  # peers' that came here
    served_s: float = 0.0  # in which those were computed
    peer_s: float = 0.0  # in which own batches were at peers
    idle_s: float = 0.0  # of that, in which nothing was computed here
    peer_bytes: int = 0  # sent there with them


class SplitPasses:
    """One a worker. Whoever calls has the device."""

    def __init__(self, runner: Any, device: DeviceLock, order: LinkOrder) -> None:
        self._runner, self._device, self._order = runner, device, order
        self._model = internals.decoder_of(runner)
        self._block_tokens = int(runner.cache_config.block_size)
        self.tally = SplitTally()

    def forward(
        self,
        member: Membership,
        narrow: bool,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        embedded: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the model gives; a PeerError where a part cannot be had. `narrow`: the pool is as small as a
        whole model's already."""
        batch = internals.batch_in_model(self._block_tokens)
        assert batch is not None
        hidden = embedded if embedded is not None else self._model.embed(input_ids)
        residual: torch.Tensor | None = None
        for part, layers in enumerate(member.parts):
            if part == member.part:
                hidden, residual = self._through(layers, positions, hidden, residual)
            else:
                tensors = [positions, hidden, batch.query_start, batch.seq_lens, batch.blocks, batch.slots]
                tensors += [residual] if residual is not None else []
                sizes = [batch.tokens, batch.longest_query, batch.longest]
                hidden, residual = self._elsewhere(member, part, {"sizes": sizes, "narrow": narrow}, tensors)
        self.tally.passes += 1
        hidden, _ = self._model.norm(hidden, residual)
        return hidden

    def serve(self, member: Membership, message: Message, offset: int) -> Message:
        """Compute a peer's batch through the layers kept here; rows of its blocks begin at `offset`."""
        positions, hidden, query_start, seq_lens, blocks, slots, *residual = message.tensors
        batch = internals.BatchKv(query_start, seq_lens, blocks, slots, *message.values["sizes"])
        named = batch.within(member.blocks, self._block_tokens, len(positions))
        if named is None or len(hidden) != len(positions):
            raise PeerRefused(f"it is no batch of a pool of {member.blocks} blocks")
        batch = replace(
            batch,
            blocks=torch.where(named, blocks, 0) + offset,
            slots=torch.where(slots >= 0, slots + offset * self._block_tokens, slots),
        )
        names = [self._model.attention[index] for index in member.kept]
        began = time.monotonic()
        seen = [tensor.to(self._runner.device) for tensor in (positions, hidden, *residual)]
        with internals.model_with(self._runner, names, batch, seen[0]):
            through = self._through(member.kept, seen[0], seen[1], seen[2] if residual else None)
        answer = [tensor.to("cpu") for tensor in through if tensor is not None]  # when it is computed
        self.tally.served += 1
        self.tally.served_s += time.monotonic() - began
        return Message(PeerAsk.DONE, message.epoch, {}, answer)

    def _through(
        self, layers: range, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for index in layers:
            hidden, residual = self._model.layers[index](positions, hidden, residual)
        return hidden, residual

    def _elsewhere(
        self, member: Membership, part: int, values: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = tensors[0].device
        tensors = [tensor.to("cpu", copy=True) for tensor in tensors]  # after all that was launched before
        began, served_s = time.monotonic(), self.tally.served_s
        with self._device.lent(), self._order.batch():
            answer = member.ask(part, PeerAsk.RUN, values, tensors)
        gone_s = time.monotonic() - began  # and until the device was free, which is among what was served
        self.tally.peer_s += gone_s
        self.tally.idle_s += max(0.0, gone_s - (self.tally.served_s - served_s))
        self.tally.peer_bytes += sum(tensor.nbytes for tensor in tensors)
        after, left = (tensor.to(device) for tensor in answer.tensors)
        return after, left
