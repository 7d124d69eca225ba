"""SLO classes: which one a turn is of, and what engines are told of it.

A class is named by the header `X-SLO-Class` or the body's `slo_class`; by llm-d's header of an objective, if
one is called so; by the caller, where the fleet file says so; else it is `default`. A class, or a hint's
priority, is worth so many seconds: turns that wait are served the better first, and lesser ones at least once
in as long (`placement/order.py`). Among turns that run only classes count, for anybody may send a priority.
A class's targets are the tightest that its turns may ask for.
"""

import math
from collections.abc import Mapping
from typing import Any

from router.config import DEFAULT_CLASS, GatewayConfig, SloClass, SloTargets
from router.errors import BadRequest
from router.fields import positive
from router.hints import Hints
from router.metrics import SLO_TARGETS_RAISED

HEADER, FIELD = "x-slo-class", "slo_class"
OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_TTFT, _TBT = "slo_ttft_ms", "slo_tbt_ms"
TARGETS = {  # of llm-d: header to the engine's argument
    "x-slo-ttft-ms": _TTFT,
    "x-llm-d-slo-ttft-ms": _TTFT,
    "x-slo-tpot-ms": _TBT,
    "x-llm-d-slo-tpot-ms": _TBT,
}
PRIORITY_S = 1.0  # what a level of a hint's priority is worth
_MILLISECONDS = positive(24 * 3600 * 1000.0)


class Classes:
    def __init__(self, config: GatewayConfig) -> None:
        default = SloClass(DEFAULT_CLASS, config.slo)
        self._by_name = {default.name: default} | {one.name: one for one in config.classes}
        self._ttft_s, self._tbt_s = config.ttft_s, config.tbt_s
        self._of_owner = {owner: one for one in config.classes for owner in one.owners}

    def choose(self, owner: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> SloClass:
        own = self._of_owner.get(owner, self._by_name[DEFAULT_CLASS])
        said = headers.get(HEADER) or body.get(FIELD)
        if said:
            named = self._by_name.get(said) if isinstance(said, str) else None
            if named is None:
                names = ", ".join(sorted(name for name, one in self._by_name.items() if one.open_to(owner)))
                raise BadRequest(f"{FIELD} is none of this fleet's classes: {names}", param=FIELD)
            if not named.open_to(owner):
                raise BadRequest(f"the class {named.name} is for others: leave {FIELD} out", param=FIELD)
            return named
        for header in OBJECTIVES:
            objective = self._by_name.get(headers.get(header, ""))
            if objective is not None and objective.open_to(owner):
                return objective
        return own

    def engine_arguments(
        self, of: SloClass, hints: Hints, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is said in a body in the place of its own `vllm_xargs`; what a client asks for itself stays,
        but for less time than its class has: an engine's iterations are as short as its tightest turn wants
        them, at the cost of all, and it aborts offline ones for prompts that would be late."""
        said: dict[str, Any] = {}
        least = self._least(of)
        if _own(of).last_turn_tbt_s:
            said[_TBT] = least[_TBT]
        for header, argument in TARGETS.items():
            if header in headers:
                said[argument] = _milliseconds(header, headers[header])
        if ahead := ahead_s(of, hints):
            said["ahead_s"] = ahead
        if hints.priority:
            said["priority_s"] = hints.priority * PRIORITY_S
        asked = body.get("vllm_xargs") or {}
        said |= asked
        raised = {name: least_ms for name, least_ms in least.items() if said.get(name, math.inf) < least_ms}
        if raised:
            said |= raised
            SLO_TARGETS_RAISED.labels(of.name).inc()
        return {"vllm_xargs": said} if said != asked else {}

    def _least(self, of: SloClass) -> dict[str, float]:
        """Milliseconds. A longer TTFET of the class does not count: engines have their own TTFT for all."""
        ttft_s = min(_own(of).ttfet_s or math.inf, self._ttft_s or 0.0)
        return {_TTFT: ttft_s * 1000, _TBT: (_own(of).last_turn_tbt_s or self._tbt_s or 0.0) * 1000}


def _own(of: SloClass) -> SloTargets:
    """Those of `default` are of answers to users: engines have theirs."""
    return SloTargets() if of.name == DEFAULT_CLASS else of.targets


def ahead_s(of: SloClass, hints: Hints) -> float:
    return of.ahead_s + hints.priority * PRIORITY_S


def _milliseconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    _MILLISECONDS(header, value)
    return value
