"""The interface of in-engine policies, their settings, and the registry by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from placement.latency import BatchWork, LatencyModel
from placement.serving.state import DEFAULT_SLO, EngineView, IterationDone, Plan, Row, RunningBatch, Slo


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What the fleet file may set for an engine's policy."""

    policy: str = "conserve"
    slo: Slo = field(default=DEFAULT_SLO)  # of requests that bring none
    margin: float = 0.1  # of a target kept free for what the model gets wrong (conserve: until it knows)
    safepoints: bool = True  # off: arrivals never raise the flag
    chunk_tokens: int = 512  # sarathi: tokens an iteration is filled to
    offline_share: float = 0.0  # of an iteration's tokens that offline work gets at least; 0: none
    ageing_s: float | None = (
        None  # an offline row not served for this long gets one token an iteration at least
    )
    online_reserve: float = 0.02  # of all blocks kept free of newly started offline rows
    batch_start: int = 8  # bros: requests of the first batch, and after a violation
    # Of its TTFT, what an arrival may use up before the running iteration is aborted for it. The paper has
    # all of it; but a prompt that waits makes those wait that arrive behind it.
    ttft_share: float = 0.35
    # Where it would meet its TTFT all the same: seconds that the abort gives the arrival for each second of
    # the iteration that it throws away, at least.
    abort_worth: float = 0.5
    abort_gain_s: float = 0.005  # an iteration with less than this left is not worth aborting
    # Rows that decode may cost this many times an iteration's constant before offline work has less of what
    # their promise leaves; infinity: it always has all of it.
    rows_per_constant: float = 2.0


class ServingPolicy(Protocol):
    """Decides what an engine does next. Called by the engine's scheduler and by the simulator.

    `plan` before every iteration, then `filling.take` for every candidate in order, `observe` after it.
    `interrupts` is called on another thread while an iteration runs: it must not change the policy's state.
    """

    def plan(self, view: EngineView, model: LatencyModel) -> Plan: ...

    def interrupts(
        self, arrival: Row, queued: BatchWork, batch: RunningBatch, model: LatencyModel
    ) -> bool: ...

    def observe(self, done: IterationDone) -> None: ...


_REGISTRY: dict[str, Callable[[ServingSettings], ServingPolicy]] = {}


class UnknownPolicyError(ValueError):
    pass


def register(name: str, make: Callable[[ServingSettings], ServingPolicy]) -> None:
    _REGISTRY[name] = make


def make_policy(settings: ServingSettings) -> ServingPolicy:
    try:
        return _REGISTRY[settings.policy.replace("-", "_")](settings)
    except KeyError:
        known = ", ".join(sorted(_REGISTRY))
        raise UnknownPolicyError(
            f"no in-engine policy is called {settings.policy!r}; choose one of {known}"
        ) from None


def policy_names() -> tuple[str, ...]:
    return tuple(sorted(_REGISTRY))
