"""Prefillers do not recompute cached prefixes, and keep them as long as they have space."""

from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import Prefixes
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

from .conftest import fleet


def prefilled(cached: bool, kv_tokens: int = 300_000) -> int:
    """Return the tokens that a prefiller computes for two conversations of three turns each.

    Every turn is prefilled on the prefiller (full disaggregation), and the conversations alternate.
    """
    turns = (TraceTurn(8_000, 0, 1), TraceTurn(100, 8_001, 1, 10.0), TraceTurn(100, 8_102, 1, 10.0))
    found = [TraceConversation(f"c{i}", 4.0 * i, turns) for i in range(2)]
    settings = SimulationSettings(SystemSettings(System.FULL_DISAGGREGATION), prefillers_cache=cached)
    return Simulation(fleet(kv_tokens=kv_tokens), settings).run(found).totals.prefilled_tokens


def test_a_prefiller_with_cached_prefixes_computes_only_new_tokens() -> None:
    # 101: append of a later turn and answer before it. 3: each turn's last token, which the decoder computes.
    assert prefilled(cached=True) == 2 * (8_000 + 101 + 101 + 3)
    assert prefilled(cached=False) == 2 * (8_000 + 8_101 + 8_202 + 3)


def test_the_least_recently_used_prefix_is_evicted_when_another_needs_its_space() -> None:
    held = Prefixes(1_000)
    held.remember("a", 600)
    held.remember("b", 300)
    held.remember("a", 700)  # grown, and used last
    assert (held.of("a"), held.of("b")) == (700, 300)
    held.remember("c", 200)
    assert (held.of("a"), held.of("b"), held.of("c")) == (700, 0, 200)
    held.remember("larger", 1_001)
    assert held.of("larger") == 0 and held.of("a") == 700
    assert Prefixes(0).of("a") == 0
