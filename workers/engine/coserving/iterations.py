"""Records of iterations from their scheduling to their result, with log lines and metrics.

vLLM's front end serves the metrics at `/metrics` (kvtransfer/connector_stats.py).
"""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvtransfer.metrics import CounterSpec, HistogramSpec
from placement.scheduling.interface import IterationDone, RequestView, RunningBatch
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_order import PromptSharing


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Request of an iteration, as recorded when it was scheduled."""

    request: Any
    start: int  # tokens that were computed before the iteration
    written: tuple[tuple[int, ...], ...]  # ids of the blocks that it writes, by KV cache group
    not_its_to_register: tuple[int, ...]  # number of blocks full before `start` or adopted, by group
    admitted: bool  # whether it entered the batch with this iteration, perhaps with prefix hits


@dataclass(slots=True)
class PendingIteration:
    """Iteration that is scheduled and has no result yet."""

    started: float
    batch: RunningBatch
    epoch: int  # 0 if it cannot be aborted
    scheduled: tuple[ScheduledRequest, ...]  # empty if it cannot be aborted
    offline_tokens: int
    preempted: int = 0  # offline requests that were preempted for it
    budget_tokens: int = 0  # offline tokens that fit into it
    again_tokens: int = 0  # offline tokens that are computed again after a preemption
    aborted: bool = False
    disowned: int = 0  # blocks that the roll-back took out of the prefix cache
    # The arrival watch uses these in another thread while the iteration is armed and in the model.
    queued: BatchWork = field(default_factory=BatchWork)  # online work that waits for the next iteration
    arrivals: list[RequestView] = field(default_factory=list)
    raised: bool = False  # whether the flag was raised for an arrival
    prompt_tokens: int = 0  # of online prompts
    prompt_share: float = 1.0  # share of the engine's time that decoding requests leave to prompts
    overlapped: bool = False  # whether it was scheduled while the previous iteration ran
    decodes: bool = False  # whether every request decodes one token
    repeats: bool = False  # whether the same requests decoded one token each in the previous iteration

    @property
    def classes(self) -> str:
        """Return the classes of this iteration's requests, as in metrics: online, offline or mixed."""
        if not self.batch.online_requests:
            return "offline"
        return "mixed" if self.batch.offline_requests else "online"

    def done(self, now: float, seconds: float, late: int) -> IterationDone:
        """Return this iteration as a policy observes it after its end."""
        return IterationDone(now, self.batch.seconds, seconds, late, self.aborted)


def count(iteration: PendingIteration, counts: MutableMapping[str, Any], seconds: float, late: int) -> None:
    counts[f"coserving_iterations.{iteration.classes}"] += 1
    counts["coserving_preemptions"] += iteration.preempted
    counts["coserving_late_tokens"] += late
    counts["coserving_disowned_blocks"] += iteration.disowned
    counts["coserving_budget_tokens"] += iteration.budget_tokens
    counts["coserving_offline_tokens_lost.preemption"] += iteration.again_tokens
    if iteration.aborted:
        counts["coserving_aborts"] += 1
        counts["coserving_aborted_seconds"] += seconds
        counts["coserving_offline_tokens_lost.abort"] += iteration.offline_tokens
        counts["coserving_prompt_tokens_lost"] += iteration.prompt_tokens
        return
    counts[f"coserving_seconds.{iteration.classes}"] += seconds
    counts[f"coserving_predicted_seconds.{iteration.classes}"] += iteration.batch.seconds
    counts["coserving_offline_tokens"] += iteration.offline_tokens
    counts["coserving_online_tokens"] += iteration.batch.work.new_tokens - iteration.offline_tokens


def observe(
    iteration: PendingIteration,
    observations: MutableMapping[str, list[float]],
    seconds: float,
    abort_wait_s: float,
) -> None:
    if iteration.aborted:
        observations["coserving_abort_wait"].append(abort_wait_s)
    else:
        observations["coserving_model_error"].append(abs(iteration.batch.seconds - seconds) / seconds)


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """Line of the iteration log, which shows the content and the time of one iteration."""

    at: float  # end of the iteration, on the monotonic clock
    seconds: float
    predicted_s: float
    new_tokens: int
    attended: int
    context: int
    online_requests: int
    offline_requests: int
    offline_tokens: int
    preempted: int
    late_requests: int
    aborted: bool
    overlapped: bool = False  # whether it was scheduled while the previous iteration ran
    abort_layer: int = -1  # -1: it was not aborted
    signal_to_abort_s: float = 0.0
    check_gap_s: float = 0.0  # at an abort: time between the last two checks of the flag
    disowned_blocks: int = 0  # blocks that the roll-back took out of the prefix cache
    again_tokens: int = 0  # offline tokens that were computed again after a preemption
    before: int = 0  # sum over requests of new tokens times context
    prompt_tokens: int = 0  # of online prompts

    @classmethod
    def of(cls, iteration: PendingIteration, now: float, seconds: float, late: int) -> "IterationRecord":
        batch, work = iteration.batch, iteration.batch.work
        return cls(
            at=now,
            seconds=seconds,
            predicted_s=batch.seconds,
            new_tokens=work.new_tokens,
            attended=work.attended,
            context=work.context,
            online_requests=batch.online_requests,
            offline_requests=batch.offline_requests,
            offline_tokens=iteration.offline_tokens,
            preempted=iteration.preempted,
            late_requests=late,
            aborted=iteration.aborted,
            overlapped=iteration.overlapped,
            again_tokens=iteration.again_tokens,
            before=work.before,
            prompt_tokens=iteration.prompt_tokens,
        )

    @property
    def work(self) -> BatchWork:
        requests = self.online_requests + self.offline_requests
        return BatchWork(self.new_tokens, self.attended, self.context, self.before, requests)


class IterationLog:
    def __init__(self, path: str) -> None:
        self._file: BinaryIO | None = Path(path).open("ab", buffering=0) if path else None  # noqa: SIM115

    @property
    def kept(self) -> bool:
        return self._file is not None

    def write(self, record: IterationRecord) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_iterations(path: Path) -> list[IterationRecord]:
    """Return the complete lines of a log that may still grow."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [IterationRecord(**json.loads(line)) for line in lines]


CLASSES = ("online", "offline", "mixed")

COUNTERS: Mapping[str, CounterSpec] = {
    "coserving_iterations": CounterSpec(
        "conserve_coserving_iterations",
        "Iterations that ended, by the requests in them: online, offline, mixed.",
        "requests",
        CLASSES,
    ),
    "coserving_seconds": CounterSpec(
        "conserve_coserving_seconds",
        "Time of iterations that were not aborted, by the requests in them.",
        "requests",
        CLASSES,
    ),
    "coserving_predicted_seconds": CounterSpec(
        "conserve_coserving_predicted_seconds",
        "Time that the latency model predicted for the iterations in conserve_coserving_seconds.",
        "requests",
        CLASSES,
    ),
    "coserving_aborted_seconds": CounterSpec(
        "conserve_coserving_aborted_seconds", "Time of iterations that were aborted."
    ),
    "coserving_signals": CounterSpec(
        "conserve_coserving_signals", "Arrivals for which the running iteration was to be aborted."
    ),
    "coserving_unjudged": CounterSpec(
        "conserve_coserving_unjudged_arrivals",
        "Arrivals that waited for the running iteration because of an error (see the log). It should be 0.",
    ),
    "coserving_unplanned": CounterSpec(
        "conserve_coserving_unplanned_iterations",
        "Iterations that vLLM's own rules scheduled because planning failed (see the log). It should be 0.",
    ),
    "coserving_aborts": CounterSpec(
        "conserve_coserving_aborts", "Iterations left at a safepoint and rolled back."
    ),
    "coserving_disowned_blocks": CounterSpec(
        "conserve_coserving_disowned_blocks", "Blocks that roll-backs took out of the prefix cache again."
    ),
    "coserving_preemptions": CounterSpec(
        "conserve_coserving_preemptions", "Offline requests that gave their memory to online ones."
    ),
    "coserving_online_tokens": CounterSpec(
        "conserve_coserving_online_tokens", "Online tokens computed, in iterations that were not aborted."
    ),
    "coserving_offline_tokens": CounterSpec(
        "conserve_coserving_offline_tokens",
        "Offline tokens computed, in iterations that were not aborted.",
    ),
    "coserving_budget_tokens": CounterSpec(
        "conserve_coserving_budget_tokens",
        "Offline tokens that fit into iterations, by the latency model and the tightest SLO target.",
    ),
    "coserving_offline_tokens_lost": CounterSpec(
        "conserve_coserving_offline_tokens_lost",
        "Offline tokens whose work was thrown away, by cause: abort (an iteration left at a safepoint), "
        "preemption (computed again, because neither the host nor the prefix cache held them).",
        "cause",
        ("abort", "preemption"),
    ),
    "coserving_prompt_tokens_lost": CounterSpec(
        "conserve_coserving_prompt_tokens_lost",
        "Tokens of turns' prompts in iterations that were left at a safepoint.",
    ),
    "coserving_late_tokens": CounterSpec(
        "conserve_coserving_late_tokens", "Online tokens made later than their SLO target."
    ),
}

HISTOGRAMS: Mapping[str, HistogramSpec] = {
    "coserving_abort_wait": HistogramSpec(
        "conserve_coserving_abort_wait_seconds",
        "From the signal of an arrival to the safepoint at which the iteration was left.",
        (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    ),
    "coserving_model_error": HistogramSpec(
        "conserve_coserving_model_error_ratio",
        "Error of the predicted time of iterations that were not aborted, as a share of the measured time.",
        (0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.5, 1.0, 2.0),
    ),
}


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
