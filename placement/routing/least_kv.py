"""Least-KV rule: the placement rule of the conversation paper.

A conversation is bound to the decoder with the least KV in use among those where it fits. Its first prompt is
computed by the prefiller that would finish it first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from placement.engines import EngineInfo, EngineState
from placement.routing.decoder_pool import DecoderPool, KvFill
from placement.routing.engine_speed import EngineSpeed
from placement.routing.placer_settings import PlacerSettings
from placement.routing.prefill_queue import PrefillQueues
from placement.routing.prefix_map import PrefixMap, PromptPrefix
from placement.routing.receipts import (
    DecoderChoice,
    Estimates,
    PrefillerChoice,
    Refusal,
    RefusalReason,
    Why,
    refuse,
)
from placement.scheduling.prefill_curve import PrefillCurve
from placement.sizing.capacity import Signals

RETRY_NO_CAPACITY_S, RETRY_NO_ENGINE_S = 5.0, 10.0  # `retry_after` of refusals


@dataclass(frozen=True, slots=True)
class FirstTurn:
    key: str
    prompt_tokens: int
    preferred_decoder: str | None = None  # decoder of the conversation's parent
    had_decoder: bool = False  # whether the conversation had a decoder that is gone
    prefixes: Sequence[PromptPrefix] = ()  # prefixes that other prompts may share, the shortest first
    queue_weight: float = 0.0  # prompts with a lower weight wait behind it
    answers: int = 1  # number of answers to the prompt (`n`)


@dataclass(frozen=True, slots=True)
class LaterTurn:
    key: str
    decoder: str  # the decoder that the conversation is bound to
    prompt_tokens: int
    uncached_tokens: int
    prefix_on: str = ""  # prefiller that still has the first `prefix_tokens` of the prompt
    prefix_tokens: int = 0
    queue_weight: float = 0.0
    answers: int = 1


class EngineChoice(NamedTuple):
    """Engines chosen for a turn, before KV is reserved there."""

    decoder: DecoderChoice
    prefiller: PrefillerChoice
    pool: DecoderPool  # pool that the decoder is in
    cached: Mapping[str, int]  # engine -> estimated tokens of the prompt that it has cached
    estimates: Estimates | None = None


@dataclass(frozen=True, slots=True)
class RoutingState:
    """State of the fleet that a placement rule reads."""

    settings: PlacerSettings
    decoders: DecoderPool = field(default_factory=DecoderPool)
    prefillers: PrefillQueues = field(default_factory=PrefillQueues)
    prefixes: PrefixMap = field(default_factory=PrefixMap)
    split_kv: dict[str, int] = field(default_factory=dict)  # decoder that shares its layers -> its KV tokens

    def need(self, turn: FirstTurn) -> int:
        """Return the KV tokens to reserve for a first turn: its prompt, and headroom for each answer.

        There is headroom for fewer answers if no decoder could ever hold all of them.
        """
        headroom, answers = self.settings.headroom_tokens, turn.answers
        while answers > 1 and not self.decoders.could_ever_hold(turn.prompt_tokens + answers * headroom):
            answers -= 1
        return turn.prompt_tokens + answers * headroom

    def cached_tokens(self, turn: FirstTurn, now: float) -> dict[str, int]:
        """Return, for each engine, the estimated tokens of the prompt that it has cached.

        The last token never counts as cached, because it is always computed.
        """
        most = turn.prompt_tokens - 1
        cached = self.prefixes.cached_tokens(turn.prefixes, now)
        return {engine: min(tokens, most) for engine, tokens in cached.items()}


class LeastKvRule:
    def __init__(self, state: RoutingState) -> None:
        self.state = state

    def first_turn(self, turn: FirstTurn, now: float) -> EngineChoice | Refusal:
        choice = self.find(turn, now)
        return choice if isinstance(choice, Refusal) else self.unless_saturated(choice)

    def later_turn(self, turn: LaterTurn, now: float) -> EngineChoice:
        choice = self.find_later(turn, now)
        policy, limit_s = self.state.settings.policy, self.state.settings.max_prefill_wait_s
        best = choice.prefiller.chosen
        if best is not None and best.wait_s > policy.later_turn_waits(best.prefill_s, limit_s):
            return choice._replace(prefiller=PrefillerChoice.none(Why.PREFILLERS_BUSY))
        return choice

    def find(self, turn: FirstTurn, now: float) -> EngineChoice | Refusal:
        """Return the best engines for a first turn, no matter how long the prefiller's queue is."""
        settings, decoders = self.state.settings, self.state.decoders
        decoder = decoders.choose(self.state.need(turn), turn.preferred_decoder)
        if decoder is None:
            return self._no_decoder(self.state.need(turn))
        cached = self.state.cached_tokens(turn, now)
        if not settings.policy.disaggregates:
            prefiller = PrefillerChoice.none(Why.PREFILLED_LOCALLY)
        elif decoder.chosen.engine in self.state.split_kv:
            prefiller = PrefillerChoice.none(Why.SHARES_LAYERS)
        elif turn.had_decoder and settings.shared_tier:
            prefiller = PrefillerChoice.none(Why.RESTORED)
        else:
            prefillers, tokens, weight = self.state.prefillers, turn.prompt_tokens, turn.queue_weight
            found = prefillers.choose(tokens, now, weight)
            prefiller = found or PrefillerChoice.none(Why.NO_PREFILLER_UP)
            prefiller = prefillers.prefer_cached(prefiller, tokens, cached, now, weight)
        return EngineChoice(decoder, prefiller, decoders, cached)

    def move(self, turn: FirstTurn, target: str | None) -> EngineChoice | Refusal:
        """Return the decoder that a conversation moves to: `target`, or the one with the least KV in use.

        The former decoder sends the KV.
        """
        decoder = self.state.decoders.choose(self.state.need(turn), target)
        if decoder is None or (target and decoder.chosen.engine != target):
            return self._no_decoder(self.state.need(turn))
        if target:
            decoder = decoder._replace(why=Why.WAITS_LESS)
        return EngineChoice(decoder, PrefillerChoice.none(Why.HAS_KV), self.state.decoders, {})

    def find_later(self, turn: LaterTurn, now: float) -> EngineChoice:
        """Return the bound decoder, and the best prefiller if the turn has much to compute."""
        settings, decoders = self.state.settings, self.state.decoders
        decoder = DecoderChoice(Why.BOUND, decoders.option(turn.decoder), (), len(decoders), 0)
        large = settings.policy.later_turn_through_prefiller(
            settings.redisaggregation, turn.uncached_tokens, turn.prompt_tokens
        )
        if not large:
            prefiller = PrefillerChoice.none(Why.PREFILLED_LOCALLY)
        elif turn.decoder in self.state.split_kv:
            prefiller = PrefillerChoice.none(Why.SHARES_LAYERS)
        else:
            found = self.state.prefillers.choose(turn.prompt_tokens, now, turn.queue_weight)
            prefiller = found or PrefillerChoice.none(Why.NO_PREFILLER_UP)
        return EngineChoice(decoder, prefiller, decoders, {turn.prefix_on: turn.prefix_tokens})

    def unless_saturated(self, choice: EngineChoice) -> EngineChoice | Refusal:
        """Return `choice`, or a refusal if the turn would wait for its prefiller for too long."""
        wait_s = choice.prefiller.chosen.wait_s if choice.prefiller.chosen else 0.0
        if wait_s <= (limit_s := self.state.settings.max_prefill_wait_s):
            return choice
        # The queue shrinks by a second each second, so the excess is the time until it is short enough.
        return refuse(RefusalReason.SATURATED, wait_s - limit_s, wait_s=wait_s, limit_s=limit_s)

    def _no_decoder(self, need: int) -> Refusal:
        decoders = self.state.decoders
        if not len(decoders):
            return refuse(RefusalReason.NO_DECODER, RETRY_NO_ENGINE_S)
        if not decoders.could_ever_hold(need):
            return refuse(RefusalReason.TOO_LARGE, 0.0, tokens=need)
        return refuse(RefusalReason.NO_CAPACITY, RETRY_NO_CAPACITY_S, tokens=need, decoders=len(decoders))

    # Events. They change nothing here, because this rule keeps no state of its own.

    def engine_up(self, info: EngineInfo, curve: PrefillCurve | None) -> None:
        """Add an engine. `curve` is None if its speed is unknown."""

    def engine_down(self, engine: str) -> tuple[str, ...]:
        """Remove an engine; return the conversations with KV reserved there in a pool of the rule's own."""
        return ()

    def observe(self, state: EngineState, last_seq: int, speed: EngineSpeed, now: float) -> None:
        """Apply a report of an engine."""

    def placed(self, key: str, choice: EngineChoice, uncached: int, now: float) -> None:
        """Record a placed turn whose decoder would compute `uncached` tokens of its prompt."""

    def transferred(self, tokens: int, seconds: float) -> None:
        """Record the `seconds` that a transfer of `tokens` took from prefill to the start of decoding."""

    def release(self, key: str) -> None:
        """Forget a conversation that ended, or whose placement was not used."""

    @property
    def role_changes(self) -> int:
        """Return how often a prefiller started or stopped taking conversations."""
        return 0

    def pool_of(self, engine: str) -> DecoderPool:
        return self.state.decoders

    def kv_fill(self) -> KvFill:
        """Return the KV in use on the engines that take conversations, and the limit on it."""
        return self.state.decoders.fill()

    def with_roles(self, signals: Signals) -> Signals:
        """Return the signals with the time that engines spend on work outside their role added."""
        return signals
