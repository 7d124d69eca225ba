"""The systems under test. Each says, for a turn, which engine prefills it and where it runs.

Placing is the product's `Placer` in all of them; what differs from ConServe is written here, by name.
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from placement.placer import FirstTurn, LaterTurn, Placer, PlacerSettings, Refusal
from placement.policies import PlacingPolicy
from placement.redisaggregation import Redisaggregation
from traces.simulator.entities.live import Live


class System(StrEnum):
    CONSERVE = "conserve"
    STRICT = "strict"  # the paper to the letter: a later turn never leaves its decoder, whatever it appends
    COLLOCATED = "collocated"
    FULL_DISAGGREGATION = "full_disaggregation"
    AMPD = "ampd"  # predicts per turn; a wrong prediction sends a later turn to the prefiller
    PULL_BACK = (
        "pull_back"  # every later turn on the prefiller, its KV pulled there and the new part sent back
    )
    STICKY = "sticky"  # per turn, no disaggregation: where the prefix is, unless that engine is too busy


@dataclass(frozen=True, slots=True)
class Route:
    """Where one turn goes. `pull` is history that must reach the prefiller before it can compute."""

    decoder: str
    prefiller: str | None = None
    pull: bool = False


@dataclass(frozen=True, slots=True)
class SystemSettings:
    system: System = System.CONSERVE
    error_rate: float = 0.1  # of AMPD's predictions
    sticky_abs: int = 32  # sglang-router's balance thresholds, its defaults
    sticky_rel: float = 1.5

    def placer_settings(self, base: PlacerSettings) -> PlacerSettings:
        policy = {
            System.COLLOCATED: PlacingPolicy.COLLOCATED,
            System.STICKY: PlacingPolicy.COLLOCATED,
            System.FULL_DISAGGREGATION: PlacingPolicy.FULL_DISAGGREGATION,
        }.get(self.system, PlacingPolicy.CONSERVE)
        rule = base.redisaggregation
        if self.system is not System.CONSERVE:
            rule = Redisaggregation(above_tokens=NEVER)
        return PlacerSettings(
            policy=policy,
            headroom_tokens=base.headroom_tokens,
            fill=base.fill,
            max_prefill_wait_s=base.max_prefill_wait_s,
            redisaggregation=rule,
        )


NEVER = 1 << 60


class Router:
    """Asks the placer, and adds what the system under test does differently."""

    def __init__(self, settings: SystemSettings, placer: Placer, loads: "Loads", seed: int) -> None:
        self._settings = settings
        self._placer = placer
        self._loads = loads
        self._random = Random(f"{seed}/predictions")

    def first(self, live: Live, preferred: str | None, now: float) -> Route | Refusal:
        placed = self._placer.place(FirstTurn(live.key, live.turn.prompt_tokens, preferred), now)
        return placed if isinstance(placed, Refusal) else Route(placed.decoder, placed.prefiller)

    def later(self, live: Live, uncached: int, now: float) -> Route:
        system, settings = self._settings.system, self._settings
        if system is System.STICKY:
            return Route(
                self._loads.least_busy_unless_near(live.engine, settings.sticky_abs, settings.sticky_rel)
            )
        wrong = system is System.AMPD and self._random.random() < settings.error_rate
        if wrong or system is System.PULL_BACK:
            return Route(live.engine, self._loads.shortest_prefill_queue(), pull=True)
        prompt = live.turn.prompt_tokens
        if not self._placer.through_prefiller(uncached, prompt):
            return Route(live.engine)
        placed = self._placer.place_later(LaterTurn(live.key, live.engine, prompt, uncached), now)
        return Route(placed.decoder, placed.prefiller)


class Loads:
    """What the per-turn baselines look at: how many turns each engine has."""

    def __init__(self, turns: dict[str, int], prefillers: tuple[str, ...]) -> None:
        self._turns = turns
        self._prefillers = prefillers

    def shortest_prefill_queue(self) -> str:
        return min(self._prefillers, key=self._turns.__getitem__)

    def least_busy_unless_near(self, engine: str, absolute: int, relative: float) -> str:
        busiest, least = max(self._turns.values()), min(self._turns.values())
        if busiest - least > absolute and busiest > relative * least:
            return min(self._turns, key=self._turns.__getitem__)
        return engine
