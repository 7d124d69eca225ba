"""Rows and views for the tests of in-engine policies, and an engine of one line that fills an iteration."""

from dataclasses import replace

from placement.latency import LatencyModel
from placement.serving.policy import ServingPolicy
from placement.serving.state import EngineView, Row, Slo

MODEL = LatencyModel(per_token=1e-4, per_attended=1e-8, per_context=1e-7, constant=5e-3)
SLO = Slo(ttft_s=0.5, tbt_s=0.05)


def online(key: str, tokens: int = 100, computed: int = 99, **more: object) -> Row:
    row = Row(
        key, False, arrival=0.0, tokens=tokens, computed=computed, running=True, slo=SLO, last_token=10.0
    )
    return replace(row, blocks=-(-computed // 16), **more)  # type: ignore[arg-type]


def arrived(key: str, tokens: int = 100, at: float = 10.0) -> Row:
    return Row(key, False, arrival=at, tokens=tokens, computed=0, slo=SLO)


def offline(key: str, tokens: int = 2000, computed: int = 0, **more: object) -> Row:
    row = Row(key, True, arrival=0.0, tokens=tokens, computed=computed, running=True, last_served=10.0)
    return replace(row, blocks=-(-computed // 16), **more)  # type: ignore[arg-type]


def view(*running: Row, waiting: tuple[Row, ...] = (), free: int = 500, **more: object) -> EngineView:
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


def fill(policy: ServingPolicy, state: EngineView, model: LatencyModel = MODEL) -> dict[str, int]:
    """Tokens by row, as vLLM's two loops would give them: running in the plan's order, then waiting."""
    plan = policy.plan(state, model)
    by_key = {row.key: row for row in state.running}
    left, given = state.max_tokens, {}
    rows = [by_key[key] for key in plan.order] + list(state.online_waiting)
    if state.offline_head is not None:
        rows.append(state.offline_head)
    for row in rows:
        tokens = plan.filling.take(row, min(row.pending, left)) if left else 0
        left -= tokens
        given[row.key] = tokens
    return given
