"""Makers of `EngineInfo`, `EngineState` and placers for tests that run no engine."""

from collections.abc import Mapping

from placement.engines import EngineInfo, EngineState, Role
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve

CURVES = {"prefill": PrefillCurve(0.01, 1e-5, 0.0)}


def info(engine: str, role: Role = Role.DECODE, epoch: int = 1, kv_tokens: int = 10_000) -> EngineInfo:
    tier = "prefill" if role is Role.PREFILL else "decode"
    return EngineInfo(engine, tier, role, epoch, "127.0.0.1:1", "127.0.0.1:2", "", kv_tokens, 16, 32_768)


def state(
    engine: str,
    seq: int,
    live: int = 0,
    epoch: int = 1,
    confirmed: tuple[str, ...] = (),
    draining: bool = False,
) -> EngineState:
    named = dict.fromkeys(confirmed, seq)
    return EngineState(engine, epoch, seq, live, 0, 0, 10_000 - live, 0, 0, 0, 0, named, draining)


def placer(curves: Mapping[str, PrefillCurve] = CURVES, **changes: object) -> Placer:
    settings = {"headroom_tokens": 100, "fill": 0.95, "first_turns": FirstTurns.PREFILLER, **changes}
    return Placer(PlacerSettings(**settings), curves)  # type: ignore[arg-type]
