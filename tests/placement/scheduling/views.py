"""Requests and views for the tests of in-engine policies, and an engine that fills an iteration."""

from collections.abc import Mapping
from dataclasses import replace

from placement.scheduling.interface import (
    EngineView,
    RequestView,
    ServingPolicy,
    ServingSettings,
    TurnTargets,
)
from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.policy_registry import POLICIES

MODEL = LatencyModel(per_token=1e-4, per_attended=1e-8, per_context=1e-7, constant=5e-3)
SLO = TurnTargets(ttft_s=0.5, tbt_s=0.05)


def online(key: str, tokens: int = 100, computed: int = 99, **more: object) -> RequestView:
    request = RequestView(
        key, False, arrival=0.0, tokens=tokens, computed=computed, running=True, slo=SLO, last_token=10.0
    )
    return replace(request, blocks=-(-computed // 16), **more)  # type: ignore[arg-type]


def arrived(key: str, tokens: int = 100, at: float = 10.0) -> RequestView:
    return RequestView(key, False, arrival=at, tokens=tokens, computed=0, slo=SLO)


def offline(key: str, tokens: int = 2000, computed: int = 0, **more: object) -> RequestView:
    request = RequestView(
        key, True, arrival=0.0, tokens=tokens, computed=computed, running=True, last_served=10.0
    )
    return replace(request, blocks=-(-computed // 16), **more)  # type: ignore[arg-type]


def view(
    *running: RequestView, waiting: tuple[RequestView, ...] = (), free: int = 500, **more: object
) -> EngineView:
    base = EngineView(
        now=10.0,
        running=running,
        online_waiting=waiting,
        offline_waiting=0,
        offline_head=None,
        free_blocks=free,
        total_blocks=1000,
        block_tokens=16,
        max_tokens=2048,
        max_running=64,
    )
    return replace(base, **more)  # type: ignore[arg-type]


def policy_with(constants: Mapping[str, float], name: str = "conserve", **settings: float) -> ServingPolicy:
    """Return a policy with other constants than the measured defaults."""
    chosen: ServingPolicy = type("Contender", (POLICIES[name],), dict(constants))(
        ServingSettings(name, **settings)  # type: ignore[arg-type]
    )
    return chosen


def fill(policy: ServingPolicy, state: EngineView, model: LatencyModel = MODEL) -> dict[str, int]:
    """Return the tokens of each request as vLLM's two loops assign them.

    Running requests come in the plan's order. Waiting requests follow, up to the first that gets no tokens.
    """
    plan = policy.plan(state, model)
    by_key = {request.key: request for request in (*state.running, *state.online_waiting)}
    left, ended = state.max_tokens, False
    given = dict.fromkeys(by_key, 0)
    waiting = [by_key[key] for key in plan.waiting or [one.key for one in state.online_waiting]]
    requests = [by_key[key] for key in plan.order] + waiting
    if state.offline_head is not None:
        requests.append(state.offline_head)
    for request in requests:
        tokens = plan.builder.take(request, min(request.pending, left)) if left and not ended else 0
        ended = ended or (not tokens and not request.running)
        left -= tokens
        given[request.key] = tokens
    return given
