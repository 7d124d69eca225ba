"""Roles of prefillers follow the load of a simulated fleet, and do not oscillate."""

from collections import Counter

from placement.routing.placer_settings import PlacerSettings, PrefillerRoles
from traces.format import TraceConversation, TraceTurn
from traces.simulator.kv import Pressure
from traces.simulator.metrics import percentile
from traces.simulator.policies import System, SystemSettings
from traces.simulator.simulation import Simulation, SimulationSettings

from .conftest import fleet

PHASE_S = 40.0


def long_prompts(begin_s: float) -> list[TraceConversation]:
    """Return first turns that two prefillers compute in two thirds of their time, with short answers."""
    times = (begin_s + number * 0.5 for number in range(int(PHASE_S / 0.5)))
    return [TraceConversation(f"first {at}", at, (TraceTurn(20_000, 0, 10),)) for at in times]


def agents(begin_s: float) -> list[TraceConversation]:
    """Return agents whose later turns append 3,000 tokens, too few for a prefiller."""
    turns, context = [TraceTurn(1_000, 0, 50)], 1_050
    for _ in range(9):
        turns.append(TraceTurn(3_000, context, 50, 0.2))
        context += 3_050
    times = (begin_s + number / 4 for number in range(int(PHASE_S * 4)))
    return [TraceConversation(f"agent {at}", at, tuple(turns)) for at in times]


class Watched:
    """Plays conversations on a fleet, by default with elastic roles, and records bindings and changes."""

    def __init__(
        self, found: list[TraceConversation], roles: PrefillerRoles = PrefillerRoles.ELASTIC
    ) -> None:
        placer = PlacerSettings(max_prefill_wait_s=1e9, headroom_tokens=64, roles=roles)
        settings = SimulationSettings(SystemSettings(System.ELASTIC), placer, Pressure.PARK, tbt_s=0.05)
        simulation = Simulation(fleet(prefillers=2, decoders=3, kv_tokens=3_000_000), settings)
        self.result = simulation.run(sorted(found, key=lambda one: one.arrival_s))
        self.arrivals = {one.id: one.arrival_s for one in found}
        self.on_prefillers = [key for key, decoder, _ in simulation.bound if decoder.startswith("prefill")]
        self.times_bound = Counter(key for key, _, _ in simulation.bound)
        self.changes = simulation.fleet.placer.role_changes

    def later_ttft_s(self) -> list[float]:
        recorder = self.result.recorder
        both = zip(recorder.turn_ttft, recorder.turn_is_first, strict=True)
        return [ttft_s for ttft_s, is_first in both if not is_first]

    def taken(self, begin_s: float, end_s: float) -> int:
        return sum(begin_s <= self.arrivals[key] < end_s for key in self.on_prefillers)


def test_prefillers_take_conversations_only_while_later_turns_dominate_the_load() -> None:
    """The simulation itself checks that every token, all KV and every second is accounted for."""
    kinds = (long_prompts, agents, long_prompts, agents)
    found = [one for number, kind in enumerate(kinds) for one in kind(number * PHASE_S)]
    elastic, fixed = Watched(found), Watched(found, PrefillerRoles.FIXED)
    assert not fixed.on_prefillers and not fixed.changes
    for begin_s in (0.0, 2 * PHASE_S):
        assert elastic.taken(begin_s + 0.75 * PHASE_S, begin_s + PHASE_S) == 0, "first turns have prefillers"
        taken = elastic.taken(begin_s + PHASE_S, begin_s + 2 * PHASE_S)
        assert taken >= 20, "decoders queue, and prefillers take a share"
    assert elastic.changes <= 16, "a prefiller changes at most once in twenty seconds"
    assert set(elastic.times_bound.values()) == {1}, "no conversation moves"
    idle = [one.result.totals.idle_while_waiting for one in (elastic, fixed)]
    assert idle[0] < 0.6 * idle[1], idle
    # Not the 95th percentile: small differences in the times of reports change it by a factor of two.
    later = [percentile(one.later_ttft_s(), 50) for one in (elastic, fixed)]
    assert later[0] < 0.6 * later[1], later
