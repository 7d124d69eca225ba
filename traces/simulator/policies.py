"""Systems under test. Each decides for a turn which engine prefills it and where it runs.

Placing is the product's `Placer` in all of them but sticky routing; what differs from ConServe is written
here, by name.
"""

from collections.abc import Mapping
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

    While the engines are about as busy as each other, a turn goes where most of its prompt has been sent
    before, if that is more than `least_match` of it, else to the engine that was sent least. When they are
    not, it goes to the least busy one. The router guesses caches from what it sent: it never asks an engine.
    """

    def __init__(self, settings: StickySettings, turns: Mapping[str, int]) -> None:
        """Start with no prefixes. `turns` maps each engine to its number of turns; the caller updates it."""
        self._settings = settings
        self._turns = turns
        self._sent = dict.fromkeys(turns, 0)  # tokens of prompts, those sent before left out
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
    ELASTIC = "elastic"  # first turns, and large later ones, where their first token comes first
    PREFILLER = "prefiller"  # the paper's rule: first turns, and large later ones, through a prefiller
    STRICT = "strict"  # the paper to the letter: a later turn never leaves its decoder, whatever it appends
    COLLOCATED = "collocated"
    FULL_DISAGGREGATION = "full_disaggregation"
    AMPD = "ampd"  # predicts per turn; a wrong prediction sends a later turn to the prefiller
    PULL_BACK = "pull_back"  # later turns on the prefiller: KV is pulled there, and the new part sent back
    STICKY = "sticky"  # per turn, no disaggregation: as SGLang's router does it

    @classmethod
    def of(cls, placer: PlacerSettings) -> "System":
        """Return the simulated system that corresponds to a fleet's settings."""
        disaggregates = placer.policy is PlacingPolicy.CONSERVE
        return cls((placer.first_turns if disaggregates else placer.policy).value)


class OverloadPolicy(StrEnum):
    """Reaction when KV is short."""

    OFF = "off"  # idle KV stays; running turns are preempted when there is no other KV
    PREEMPT = "preempt"  # plain vLLM: idle KV is lost, and running turns are computed again
    PARK = "park"  # both go to the host, and come back
    DROP = "drop"  # and when that does not suffice, parameters

    @property
    def pressure(self) -> Pressure:
        return {OverloadPolicy.OFF: Pressure.PIN, OverloadPolicy.PREEMPT: Pressure.DROP}.get(
            self, Pressure.PARK
        )


@dataclass(frozen=True, slots=True)
class TurnRoute:
    """Route of one turn. If `pull` is set, its history must reach the prefiller before it can compute."""

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
    """Router that asks the placer, and adds what the system under test does differently."""

    def __init__(
        self,
        settings: SystemSettings,
        placer: Placer,
        turns: Mapping[str, int],
        prefillers: tuple[str, ...],
        seed: int,
    ) -> None:
        """Create a system's router. Baselines use each engine's current `turns` and the prefillers' names."""
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

    def later(self, live: LiveConversation, uncached: int, prefix: tuple[str, int], now: float) -> TurnRoute:
        """Route a later turn; `prefix` is a prefiller, and how much of the prompt it still has."""
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
            return TurnRoute(live.engine)  # as most turns, it needs its binding only
        placed = self._placer.place_later(LaterTurn(live.key, live.engine, prompt, uncached, *prefix), now)
        return TurnRoute(placed.decoder, placed.prefiller)

    def _shortest_prefill_queue(self) -> str:
        return min(self._prefillers, key=self._turns.__getitem__)
