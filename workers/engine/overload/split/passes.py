"""Forward passes with shared layers: own batches visit all members, and peers' batches the layers here."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.engine.compat import split_runner as internals
from workers.engine.overload.split.membership import DeviceLock, Membership
from workers.engine.overload.split.peer_link import Message, MessageKind, PeerRefused


@dataclass
class PassCounts:
    """Counts and times of batches through shared layers since the engine's start."""

    own: int = 0  # own batches that went through peers
    served: int = 0  # batches of peers that were computed here
    served_s: float = 0.0  # time of computing them
    peer_s: float = 0.0  # time in which own batches were at peers
    idle_s: float = 0.0  # part of `peer_s` in which nothing was computed here
    peer_bytes: int = 0  # bytes sent to peers with own batches


class SplitPasses:
    """Runner of batches through shared layers. Its callers hold the device lock."""

    def __init__(self, runner: Any, device: DeviceLock) -> None:
        self._runner, self._device = runner, device
        self._model = internals.decoder_of(runner)
        self._block_tokens = int(runner.cache_config.block_size)
        self.counts = PassCounts()

    def forward(
        self,
        member: Membership,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        embedded: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute this engine's batch through all members in turn, and return the model's hidden states.

        Raises a PeerError if a member cannot be reached.
        """
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
                hidden, residual = self._at_peer(member, part, {"sizes": sizes}, tensors)
        self.counts.own += 1
        hidden, _ = self._model.norm(hidden, residual)
        return hidden

    def serve(self, member: Membership, message: Message, offset: int) -> Message:
        """Compute a peer's batch through the layers kept here. The rows of its blocks begin at `offset`."""
        positions, hidden, query_start, seq_lens, blocks, slots, *residual = message.tensors
        batch = internals.BatchKv(query_start, seq_lens, blocks, slots, *message.values["sizes"])
        named = batch.entries_in_use(member.blocks, self._block_tokens, len(positions))
        if named is None or len(hidden) != len(positions):
            raise PeerRefused(f"not a valid batch of a pool of {member.blocks} blocks")
        batch = replace(
            batch,
            blocks=torch.where(named, blocks, 0) + offset,
            slots=torch.where(slots >= 0, slots + offset * self._block_tokens, slots),
        )
        names = [self._model.attention[index] for index in member.kept]
        began = time.monotonic()
        here = [tensor.to(self._runner.device) for tensor in (positions, hidden, *residual)]
        with internals.attention_on(self._runner, names, batch, here[0]):
            outputs = self._through(member.kept, here[0], here[1], here[2] if residual else None)
        answer = [tensor.to("cpu") for tensor in outputs if tensor is not None]  # waits for the computation
        self.counts.served += 1
        self.counts.served_s += time.monotonic() - began
        return Message(MessageKind.DONE, message.epoch, {}, answer)

    def _through(
        self, layers: range, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for index in layers:
            hidden, residual = self._model.layers[index](positions, hidden, residual)
        return hidden, residual

    def _at_peer(
        self, member: Membership, part: int, values: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = tensors[0].device
        tensors = [tensor.to("cpu", copy=True) for tensor in tensors]  # waits for all launched work
        began, served_s = time.monotonic(), self.counts.served_s
        with self._device.released():
            answer = member.request(part, MessageKind.RUN, values, tensors)
        away_s = time.monotonic() - began  # includes the wait for the device lock, while peers are served
        self.counts.peer_s += away_s
        self.counts.idle_s += max(0.0, away_s - (self.counts.served_s - served_s))
        self.counts.peer_bytes += sum(tensor.nbytes for tensor in tensors)
        hidden, residual = (tensor.to(device) for tensor in answer.tensors)
        return hidden, residual
