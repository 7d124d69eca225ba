"""What a run measured: one row a conversation, one a turn, in flat arrays."""

from __future__ import annotations  # array is generic to type checkers only

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from traces.simulator.entities.gaps import Gaps
from traces.simulator.entities.live import Live

Values = NDArray[np.float64]


def percentile(values: Sequence[float] | Values, p: float) -> float:
    return float(np.percentile(np.asarray(values), p)) if len(values) else float("nan")


def gmean(values: Sequence[float] | Values) -> float:
    return float(np.exp(np.log(np.maximum(np.asarray(values), 1e-9)).mean())) if len(values) else float("nan")


@dataclass
class Recorder:
    """Filled while the simulation runs. `order` is the conversation's place in the trace."""

    order: array[int] = field(default_factory=lambda: array("l"))
    ttfet: array[float] = field(default_factory=lambda: array("d"))
    last_tbt: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    turn_ttft: array[float] = field(default_factory=lambda: array("f"))
    turn_tbt: array[float] = field(default_factory=lambda: array("f"))
    turn_is_first: array[int] = field(default_factory=lambda: array("b"))
    _effective: dict[str, float] = field(default_factory=dict)

    def turn_ended(self, live: Live, now: float) -> None:
        self.turn_ttft.append(live.first_token_at - live.turn_at)
        gaps = live.output_tokens - 1
        tbt = (now - live.first_token_at) / gaps if gaps > 0 else float("nan")
        self.turn_tbt.append(tbt)
        self.turn_is_first.append(live.turn_index == 0)
        if live.turn_index == live.conversation.effective_turn:
            self._effective[live.key] = live.first_token_at - live.arrived
        if live.is_last_turn:
            self.order.append(live.order)
            self.ttfet.append(self._effective.pop(live.key))
            self.last_tbt.append(tbt)
            self.e2e.append(now - live.arrived)

    def in_trace_order(self, values: array[float]) -> Values:
        return np.asarray(values)[np.argsort(np.asarray(self.order), kind="stable")]


@dataclass(frozen=True)
class Totals:
    """What the fleet did, in all."""

    conversations: int
    refused: int
    abandoned: int  # grew beyond what its engine can hold
    horizon_s: float
    prefilled_tokens: int
    decoded_tokens: int
    # What clients count: prompts as sent, and outputs.
    served_tokens: int
    # What a fleet that forgets nothing computes: what turns append, and outputs.
    needed_tokens: int
    transfers: int
    transferred_tokens: int
    parked_tokens: int
    restored_tokens: int
    dropped_tokens: int
    preemptions: int
    through_prefiller_again: int  # later turns
    gate_wait_s: float
    joules: float
    joules_by_tier: dict[str, float]
    events: int

    @property
    def tokens_per_joule(self) -> float:
        return self.served_tokens / self.joules

    @property
    def recomputed_tokens(self) -> int:
        return self.prefilled_tokens + self.decoded_tokens - self.needed_tokens


@dataclass(frozen=True)
class Result:
    recorder: Recorder
    totals: Totals
    gaps: Gaps | None = None

    @property
    def ttfet(self) -> Values:
        return self.recorder.in_trace_order(self.recorder.ttfet)

    @property
    def last_tbt(self) -> Values:
        return self.recorder.in_trace_order(self.recorder.last_tbt)

    @property
    def e2e(self) -> Values:
        return self.recorder.in_trace_order(self.recorder.e2e)
