"""Compare the bindings of a simulation with those of a live fleet.

A live run leaves a receipt for each binding. The simulation plays the same conversations with the arrival
times and the prompt sizes of the live run, and their decoders and prefillers are compared. Engines have the
same names on both sides, by tier and number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from traces.format import TraceConversation
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import SimulatedFleet


@dataclass(frozen=True, slots=True)
class LiveBinding:
    conversation: str  # its id in the trace
    at: float
    prompt_tokens: int
    decoder: str
    prefiller: str | None  # None: the decoder computed the first prompt

    @property
    def engines(self) -> tuple[str, str | None]:
        return self.decoder, self.prefiller

    @classmethod
    def from_placement(cls, conversation: str, placement: Mapping[str, Any]) -> "LiveBinding":
        """Read a placement in the format of `GET /v1/conversations/{id}`."""
        tokens = int(placement["receipt"]["prompt_tokens"])
        return cls(
            conversation, float(placement["at"]), tokens, str(placement["decoder"]), placement["prefiller"]
        )


@dataclass(frozen=True, slots=True)
class BindingDifference:
    conversation: str
    live: tuple[str, str | None]
    simulated: tuple[str, str | None] | None  # None: not placed


@dataclass(frozen=True, slots=True)
class Agreement:
    compared: int
    differences: tuple[BindingDifference, ...]

    @property
    def share(self) -> float:
        return 1 - len(self.differences) / self.compared if self.compared else 1.0


def compare(
    fleet: SimulatedFleet,
    settings: SimulationSettings,
    trace: Iterable[TraceConversation],
    live: Sequence[LiveBinding],
) -> Agreement:
    simulation = Simulation(fleet, settings)
    simulation.run(_trace_of_the_live_run(trace, live))
    simulated = {key: (decoder, prefiller) for key, decoder, prefiller in simulation.bound}
    return Agreement(
        len(live),
        tuple(
            BindingDifference(one.conversation, one.engines, simulated.get(one.conversation))
            for one in sorted(live, key=lambda one: one.at)
            if simulated.get(one.conversation) != one.engines
        ),
    )


def _trace_of_the_live_run(
    trace: Iterable[TraceConversation], live: Sequence[LiveBinding]
) -> list[TraceConversation]:
    """Return the conversations that were bound, with their arrivals and first prompts in the live run."""
    by_id = {conversation.id: conversation for conversation in trace}
    start = min((one.at for one in live), default=0.0)
    played = []
    for one in sorted(live, key=lambda one: one.at):
        conversation = by_id[one.conversation]
        first = replace(conversation.turns[0], appended_tokens=one.prompt_tokens, cached_tokens=0)
        turns = (first, *conversation.turns[1:])
        played.append(replace(conversation, arrival_s=one.at - start, turns=turns))
    return played
