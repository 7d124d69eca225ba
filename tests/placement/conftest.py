from collections.abc import Callable

import pytest

from placement.engines import EngineInfo, EngineState, Role
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve

CURVE = PrefillCurve(a=0.02, b=4e-5, c=2e-10)
MakeFleet = Callable[..., Placer]


def engine(name: str, role: Role = Role.DECODE, kv_tokens: int = 100_000, epoch: int = 1) -> EngineInfo:
    tier = "prefill" if role is Role.PREFILL else "decode"
    return EngineInfo(name, tier, role, epoch, "", "", "", kv_tokens, 16, 1 << 20)


def state(name: str, live: int, seq: int, epoch: int = 1, **more: object) -> EngineState:
    values: dict[str, object] = {
        "engine": name,
        "epoch": epoch,
        "seq": seq,
        "live_tokens": live,
        "parked_tokens": 0,
        "offline_tokens": 0,
        "free_tokens": 0,
        "running": 1,
        "waiting": 0,
    }
    return EngineState(**(values | more))  # type: ignore[arg-type]


@pytest.fixture
def fleet() -> MakeFleet:
    def make(prefillers: int = 1, decoders: int = 3, kv_tokens: int = 100_000, **settings: object) -> Placer:
        placer = Placer(
            PlacerSettings(**{"fill": 1.0, "first_turns": FirstTurns.PREFILLER, **settings}),  # type: ignore[arg-type]
            {"prefill": CURVE, "decode": CURVE},
        )
        for i in range(prefillers):
            placer.engine_up(engine(f"p{i}", Role.PREFILL))
        for i in range(decoders):
            placer.engine_up(engine(f"d{i}", Role.DECODE, kv_tokens))
        return placer

    return make
