"""SLO classes of turns: the choice of a turn's class, and the targets that engines get for it.

A turn's class is the first that is given: by the header `X-SLO-Class` or the body's `slo_class`, by llm-d's
objective header if a class has that name, by the owner if it has a class, otherwise `default`. Waiting turns
are ordered by the `queue_weight` of their class (`placement/priorities.py`). A client's own priority orders
only turns of the same owner, and only in the directory: engines get no weight but that of the class.
"""

import math
from collections.abc import Mapping
from typing import Any

from router.errors import BadRequest
from router.gateway.config import DEFAULT_CLASS, GatewayConfig, SloClass, SloSettings
from router.metrics import SLO_TARGETS_RAISED
from router.requests.field_checks import positive

CLASS_HEADER, CLASS_FIELD = "x-slo-class", "slo_class"
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_TTFT, _TBT = "slo_ttft_ms", "slo_tbt_ms"
_TARGET_HEADERS = {  # llm-d's headers, and the engine arguments that they set
    "x-slo-ttft-ms": _TTFT,
    "x-llm-d-slo-ttft-ms": _TTFT,
    "x-slo-tpot-ms": _TBT,
    "x-llm-d-slo-tpot-ms": _TBT,
}
PRIORITY_S = 1.0  # seconds in the queue that one level of a client's priority is worth
_MILLISECONDS = positive(24 * 3600 * 1000.0)


class SloClasses:
    """Chooses the SLO class of a turn, and the arguments that engines get for it."""

    def __init__(self, config: GatewayConfig) -> None:
        self._by_name = {one.name: one for one in config.classes}
        self._by_owner = {owner: one for one in config.classes for owner in one.settings.owners}
        self._ttft_s, self._tbt_s = config.ttft_s, config.tbt_s

    def choose(self, owner: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> SloClass:
        """Return the class of a turn. Raises BadRequest for a class that this owner cannot ask for."""
        if name := headers.get(CLASS_HEADER) or body.get(CLASS_FIELD):
            return self._named(name, owner)
        for header in OBJECTIVE_HEADERS:
            objective = self._by_name.get(headers.get(header, ""))
            if objective is not None and objective.open_to(owner):
                return objective
        return self._by_owner.get(owner, self._by_name[DEFAULT_CLASS])

    def _named(self, name: Any, owner: str) -> SloClass:
        named = self._by_name.get(name) if isinstance(name, str) else None
        if named is None:
            names = ", ".join(sorted(name for name, one in self._by_name.items() if one.open_to(owner)))
            raise BadRequest(f"{CLASS_FIELD} must name a class of this fleet: {names}", param=CLASS_FIELD)
        if not named.open_to(owner):
            raise BadRequest(
                f"the class {named.name} is reserved for other callers: leave {CLASS_FIELD} out",
                param=CLASS_FIELD,
            )
        return named

    def engine_arguments(
        self, slo_class: SloClass, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a new field `vllm_xargs` for the body, or no field if the body needs no new one.

        A client's own targets are raised to the tightest that its class may ask for, because the tightest
        target of running turns bounds every iteration, and late prompts make engines abort offline work.
        """
        arguments: dict[str, Any] = {}
        tightest_ms = self._tightest_ms(slo_class)
        if _engine_targets(slo_class).last_turn_tbt_s:
            arguments[_TBT] = tightest_ms[_TBT]
        for header, argument in _TARGET_HEADERS.items():
            if header in headers:
                arguments[argument] = _milliseconds(header, headers[header])
        if slo_class.settings.queue_weight:
            arguments["queue_weight"] = slo_class.settings.queue_weight
        requested = body.get("vllm_xargs") or {}
        arguments |= requested
        raised = {name: ms for name, ms in tightest_ms.items() if arguments.get(name, math.inf) < ms}
        if raised:
            arguments |= raised
            SLO_TARGETS_RAISED.labels(slo_class.name).inc()
        return {"vllm_xargs": arguments} if arguments != requested else {}

    def _tightest_ms(self, slo_class: SloClass) -> dict[str, float]:
        """Return the tightest targets, in milliseconds, that a turn of this class may ask for.

        A turn may ask for the engines' own TTFT target even if the TTFET target of its class is longer.
        """
        targets = _engine_targets(slo_class)
        ttft_s = min(targets.ttfet_s or math.inf, self._ttft_s or 0.0)
        return {_TTFT: ttft_s * 1000, _TBT: (targets.last_turn_tbt_s or self._tbt_s or 0.0) * 1000}


def _engine_targets(slo_class: SloClass) -> SloSettings:
    """Return the targets of a class for engines; none for `default`, whose targets only judge answers."""
    return SloSettings() if slo_class.name == DEFAULT_CLASS else slo_class.settings


def _milliseconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    _MILLISECONDS(header, value)
    return value
