from placement.engines import Role
from placement.scheduling.latency_model import LatencyModel
from placement.sizing.power_curve import PowerCurve
from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import LiveConversation
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

MODEL = LatencyModel(1e-5, 2e-9, 2e-8, 0.01, per_before=1e-9, per_request=1e-5)
POWER = PowerCurve(limit_w=300, idle_w=50, decode_w=250, prefill_w=300)


def profile(
    model: LatencyModel = MODEL, chunk: int = 2048, kv_tokens: int = 300_000, network: float = 25e9
) -> EngineProfile:
    return EngineProfile(model, POWER, chunk, kv_tokens, 1e5, network, 10e9)


def fleet(prefillers: int = 1, decoders: int = 3, **more: int) -> SimulatedFleet:
    engine = profile(**more)  # type: ignore[arg-type]
    tiers = [SimulatedTier("decode", Role.DECODE, decoders, engine)]
    if prefillers:
        tiers.append(SimulatedTier("prefill", Role.PREFILL, prefillers, engine))
    return SimulatedFleet(tuple(tiers))


def one_turn(key: str, prompt: int, output: int = 1) -> TraceConversation:
    return TraceConversation(key, 0.0, (TraceTurn(prompt, 0, output),))


def work(key: str, todo: int, left: int, context: int = 0) -> LiveConversation:
    live = LiveConversation(one_turn(key, todo + context, left), 0, 0.0)
    live.todo, live.left, live.context = todo, left, context
    return live
