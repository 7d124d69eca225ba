"""Sums over the requests of a decoding batch, so that a repeated batch need not be summed again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from placement.scheduling.interface import RunningBatch
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_order import PromptSharing
from workers.engine.coserving.iterations import PendingIteration


@dataclass(frozen=True, slots=True)
class DecodingBatch:
    """Batch of an iteration in which every request decodes one token."""

    scheduled: Mapping[str, int]  # request -> tokens, as in vLLM's output
    online: BatchWork
    offline: BatchWork
    tbt_s: float  # tightest target of the online requests, infinity without any

    def is_repeated_by(self, output: Any) -> bool:
        """Return whether the next iteration has the same requests, each with one token again."""
        admitted = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        return not admitted and bool(output.num_scheduled_tokens == self.scheduled)

    def next(self) -> "DecodingBatch":
        return replace(self, online=self.online.next_tokens(), offline=self.offline.next_tokens())

    def iteration(self, model: LatencyModel, started: float) -> PendingIteration:
        """Return the record of an iteration that computes this batch and cannot be aborted."""
        work, online = self.online + self.offline, self.online
        return PendingIteration(
            started,
            RunningBatch(
                work, online, self.offline.requests, online.requests, model.seconds(work), 0.0, None
            ),
            epoch=0,
            scheduled=(),
            offline_tokens=self.offline.new_tokens,
            prompt_share=PromptSharing(self.tbt_s).share(model.seconds(online)) if online.requests else 1.0,
            decodes=True,
            repeats=True,
        )
