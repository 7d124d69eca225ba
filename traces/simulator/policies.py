"""Defines the systems that can be simulated. Each decides which engine prefills a turn and where it runs.

All systems but sticky routing place turns with the product's `Placer`. This file has their names and how each
differs from ConServe.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from random import Random

from placement.routing.least_kv import FirstTurn, LaterTurn
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings, PlacingPolicy, Redisaggregation
from placement.routing.receipts import Refusal, Why
from traces.simulator.kv import LiveConversation, Pressure


@dataclass(frozen=True, slots=True)
class StickySettings:
    """Settings of `StickyRouting`; the defaults are those of SGLang's router."""

    least_match: float = 0.3
    balance_abs: int = 32
    balance_rel: float = 1.5


class StickyRouting:
    """Sticky routing like SGLang's router (`cache_aware`), one turn at a time, without placement.

    While all engines are about equally busy, a turn goes to the engine that was sent most of its prompt
    before, if that is more than the share `least_match`, else to the engine that was sent the fewest tokens.
    Otherwise it goes to the least busy engine. The router never asks engines what they have cached.
    """

    def __init__(self, settings: StickySettings, turns: Mapping[str, int]) -> None:
        """Start with no prefixes. `turns` maps each engine to its number of turns; the caller updates it."""
        self._settings = settings
        self._turns = turns
        self._sent = dict.fromkeys(turns, 0)  # prompt tokens by engine, without those sent there before
        self._prefixes: dict[str, dict[str, int]] = {}  # conversation -> engine -> tokens, latest last

    def choose(self, conversation: str, prompt: int, repeated: int) -> str:
        """Return the engine for a turn whose first `repeated` tokens are the same as in the previous turn."""
        sent = self._prefixes.setdefault(conversation, {})
        busiest, least = max(self._turns.values()), min(self._turns.values())
        best = max(reversed(sent), key=lambda name: min(sent[name], repeated), default=None)
        settings = self._settings
        if busiest - least > settings.balance_abs and busiest > settings.balance_rel * least:
            engine = min(self._turns, key=self._turns.__getitem__)
        elif best is not None and min(sent[best], repeated) > settings.least_match * prompt:
            engine = best
        else:
            engine = min(self._sent, key=self._sent.__getitem__)
        self._sent[engine] += prompt - min(sent.pop(engine, 0), repeated)
        sent[engine] = prompt
        return engine


class System(StrEnum):
    ELASTIC = "elastic"  # first turns and large later turns run where their first token comes soonest
    PREFILLER = "prefiller"  # the paper's rule: a prefiller computes first turns and large later turns
    STRICT = "strict"  # the paper to the letter: a later turn never leaves its decoder, whatever it appends
    COLLOCATED = "collocated"
    FULL_DISAGGREGATION = "full_disaggregation"
    AMPD = "ampd"  # predicts per turn; a wrong prediction sends a later turn to the prefiller
    PULL_BACK = "pull_back"  # later turns on the prefiller: KV is pulled there, and the new part sent back
    STICKY = "sticky"  # each turn by itself, without disaggregation, as in SGLang's router

    @classmethod
    def of(cls, placer: PlacerSettings) -> "System":
        """Return the simulated system that corresponds to a fleet's settings."""
        disaggregates = placer.policy is PlacingPolicy.CONSERVE
        return cls((placer.first_turns if disaggregates else placer.policy).value)


class OverloadPolicy(StrEnum):
    """Reaction of the simulated fleet when KV is short."""

    OFF = "off"  # idle KV stays; running turns are preempted when there is no other KV
    PREEMPT = "preempt"  # plain vLLM: idle KV is lost, and running turns are computed again
    PARK = "park"  # idle KV and preempted turns' KV go to the host, and come back
    DROP = "drop"  # as `park`; if that does not suffice, engines drop parameters

    @property
    def pressure(self) -> Pressure:
        return {OverloadPolicy.OFF: Pressure.PIN, OverloadPolicy.PREEMPT: Pressure.DROP}.get(
            self, Pressure.PARK
        )


@dataclass(frozen=True, slots=True)
class TurnRoute:
    """Route of one turn. With `pull`, the KV of earlier turns must first reach the prefiller."""

    decoder: str
    prefiller: str | None = None
    pull: bool = False
    least_kv: bool = False  # the decoder was chosen for having the least KV in use


@dataclass(frozen=True, slots=True)
class SystemSettings:
    system: System = System.PREFILLER
    error_rate: float = 0.1  # error rate of AMPD's predictions
    sticky: StickySettings = field(default_factory=StickySettings)

    def placer_settings(self, base: PlacerSettings) -> PlacerSettings:
        policy = {
            System.COLLOCATED: PlacingPolicy.COLLOCATED,
            System.STICKY: PlacingPolicy.COLLOCATED,
            System.FULL_DISAGGREGATION: PlacingPolicy.FULL_DISAGGREGATION,
        }.get(self.system, PlacingPolicy.CONSERVE)
        rule = base.redisaggregation
        if self.system not in (System.PREFILLER, System.ELASTIC):
            rule = Redisaggregation(above_tokens=NEVER)
        first_turns = FirstTurns.ELASTIC if self.system is System.ELASTIC else FirstTurns.PREFILLER
        return replace(base, policy=policy, redisaggregation=rule, first_turns=first_turns)


NEVER = 1 << 60


class SimulatedRouter:
    """Router of a simulated system: asks the placer, and adds what the system does differently."""

    def __init__(
        self,
        settings: SystemSettings,
        placer: Placer,
        turns: Mapping[str, int],
        prefillers: tuple[str, ...],
        seed: int,
    ) -> None:
        """Create a router. Only baselines use `turns` (by engine, kept up to date) and `prefillers`."""
        self._settings = settings
        self._placer = placer
        self._turns = turns
        self._prefillers = prefillers
        sticky = settings.system is System.STICKY
        self._sticky = StickyRouting(settings.sticky, turns) if sticky else None
        self._random = Random(f"{seed}/predictions")

    def first(self, live: LiveConversation, preferred: str | None, now: float) -> TurnRoute | Refusal:
        if self._sticky is not None:
            return TurnRoute(self._sticky.choose(live.key, live.turn.prompt_tokens, 0))
        placed = self._placer.place(FirstTurn(live.key, live.turn.prompt_tokens, preferred), now)
        if isinstance(placed, Refusal):
            return placed
        least_kv = placed.receipt.decoder.why is Why.LEAST_KV_IN_USE
        return TurnRoute(placed.decoder, placed.prefiller, least_kv=least_kv)

    def later(
        self,
        live: LiveConversation,
        uncached: int,
        prefix_of: Callable[[LiveConversation], tuple[str, int]],
        now: float,
    ) -> TurnRoute:
        """Route a later turn; `prefix_of` returns a prefiller, and how much of the prompt it still has."""
        system, settings = self._settings.system, self._settings
        if self._sticky is not None:
            turn = live.turn
            return TurnRoute(self._sticky.choose(live.key, turn.prompt_tokens, turn.cached_tokens))
        wrong = system is System.AMPD and self._random.random() < settings.error_rate
        if wrong or system is System.PULL_BACK:
            return TurnRoute(live.engine, self._shortest_prefill_queue(), pull=True)
        prompt = live.turn.prompt_tokens
        placing = self._placer.settings
        if not placing.policy.later_turn_through_prefiller(placing.redisaggregation, uncached, prompt):
            return TurnRoute(live.engine)  # most turns run where they are bound, without asking the placer
        later = LaterTurn(live.key, live.engine, prompt, uncached, *prefix_of(live))
        placed = self._placer.place_later(later, now)
        return TurnRoute(placed.decoder, placed.prefiller)

    def _shortest_prefill_queue(self) -> str:
        return min(self._prefillers, key=self._turns.__getitem__)
