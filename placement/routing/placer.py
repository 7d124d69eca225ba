"""Placer of turns: it keeps the two observed signals and answers from them.

It owns the prefillers' queues and the decoders' KV in use, does no I/O and has no clock. The directory calls
it in production, the simulator in simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from placement import PlacementError
from placement.engines import EngineInfo, EngineState
from placement.overload.signal import OverloadState, OverloadWatch
from placement.routing.decoder_pool import Decoders
from placement.routing.elastic import Elastic
from placement.routing.engine_speed import Speeds
from placement.routing.placer_settings import FirstTurns, PlacerSettings, PlacingPolicy
from placement.routing.prefill_queue import Prefillers
from placement.routing.prefix_map import (
    RECOMPUTE_COST,
    AskedPrompt,
    Head,
    SharedPrefixes,
    keeping_beginnings,
    with_beginning,
)
from placement.routing.receipts import (
    DecoderChoice,
    Estimates,
    PrefillerChoice,
    Receipt,
    Refusal,
    RefusalReason,
    Why,
    refuse,
)
from placement.scheduling.prefill_curve import PrefillCurve
from placement.sizing.capacity import CapacityWatch, Signals


class MissingCurve(PlacementError, LookupError):
    """A prefiller's tier has no prefill curve."""


@dataclass(frozen=True, slots=True)
class FirstTurn:
    key: str
    prompt_tokens: int
    preferred_decoder: str | None = None  # of the parent or of the fork's origin
    had_decoder: bool = False  # it has been served; where it was, it cannot stay
    heads: Sequence[Head] = ()  # beginnings that other prompts may share, by length
    ahead_s: float = 0.0  # what its class is worth: prompts of lesser ones wait behind it
    shared: int = 0  # heads with which, as its client says, others will begin


@dataclass(frozen=True, slots=True)
class LaterTurn:
    key: str
    decoder: str  # where it is bound
    prompt_tokens: int
    uncached_tokens: int
    prefix_on: str = ""  # prefiller that still has the first `prefix_tokens` of it
    prefix_tokens: int = 0
    ahead_s: float = 0.0


class Sizes(NamedTuple):
    prompt: int
    uncached: int  # on its decoder
    need: int  # to reserve


@dataclass(frozen=True, slots=True)
class Placement:
    prefiller: str | None  # None: the decoder computes the prompt itself
    decoder: str
    receipt: Receipt


class Placer:
    def __init__(
        self,
        settings: PlacerSettings,
        curves: Mapping[str, PrefillCurve],
        alike: Mapping[str, str] | None = None,
    ) -> None:
        """`curves` by tier, until engines report theirs: of all tiers of prefillers, of those of decoders
        where known. `alike`: tiers of the same hardware have the same name there."""
        self.settings = settings
        self._curves = curves
        self._infos: dict[str, EngineInfo] = {}
        self._seqs: dict[str, int] = {}
        self._speeds = Speeds(alike or {})
        self._split: dict[str, int] = {}  # decoders that share their layers, and the KV that they have now
        self._prefillers = Prefillers()
        # The last resort: prefillers, for what fits on no decoder.
        self._decoders, self._last_resort = Decoders(), Decoders()
        self._shared = SharedPrefixes()
        elastic = settings.first_turns is FirstTurns.ELASTIC and settings.policy is PlacingPolicy.CONSERVE
        self._elastic = Elastic() if elastic else None
        self._watch, self._overload = CapacityWatch(settings.capacity_window_s), OverloadWatch()

    def engine_up(self, info: EngineInfo) -> tuple[str, ...]:
        """An engine, or a new epoch of one; returns the conversations whose reservations on it are void."""
        policy = self.settings.policy
        if policy.prefills(info.role) and info.tier not in self._curves:
            raise MissingCurve(f"tier {info.tier!r} has no prefill curve; run `conserve profile`")
        lost = self.engine_down(info.engine)
        self._infos[info.engine] = info
        self._seqs[info.engine] = 0
        self._speeds.add(info.engine, info.tier)
        self._shared.holds(info.engine, info.kv_tokens)
        if policy.prefills(info.role):
            self._prefillers.add(info.engine, self._curves[info.tier])
            if self._elastic:
                self._last_resort.add(info.engine, int(info.kv_tokens * self.settings.last_resort_fill))
        if policy.holds_conversations(info.role):
            self._decoders.add(info.engine, int(info.kv_tokens * self.settings.fill))
        if self._elastic:
            self._elastic.add(info.engine, self._curves.get(info.tier))
        return lost

    def engine_down(self, engine: str) -> tuple[str, ...]:
        """Returns the conversations whose queued prefill or reservation was on it."""
        if self._infos.pop(engine, None) is None:
            return ()
        lost: dict[str, None] = {}
        self._split.pop(engine, None)
        self._speeds.remove(engine)
        self._shared.forget(engine)
        if engine in self._prefillers:
            lost |= dict.fromkeys(self._prefillers.remove(engine))
        if engine in self._decoders:
            lost |= dict.fromkeys(self._decoders.remove(engine))
        if self._elastic:
            self._elastic.remove(engine)
        if engine in self._last_resort:
            lost |= dict.fromkeys(self._last_resort.remove(engine))
        return tuple(lost)

    def observe(self, state: EngineState, now: float) -> bool:
        """Take in what an engine reports; False when it is of another epoch or out of order."""
        info = self._infos.get(state.engine)
        if info is None or state.epoch != info.epoch or state.seq <= (last := self._seqs[state.engine]):
            return False
        self._seqs[state.engine] = state.seq
        speed = self._speeds.observe(state, now)
        if state.engine in self._prefillers:
            if speed.own is not None:
                self._prefillers.reported(state.engine, speed.own, speed.curve, speed.fresh)
            self._prefillers.set_draining(state.engine, state.draining)
            if state.running == 0 and state.waiting == 0:
                before = now - self.settings.forget_prefill_after_s
                self._prefillers.forget_placed_before(state.engine, before, now)
        for holders in (self._decoders, self._last_resort):
            if state.engine in holders:
                holders.observe(state, last)
        self._note_split(state, info.kv_tokens)
        self._shared.holds(state.engine, self._split.get(state.engine, info.kv_tokens) // state.kv_per_token)
        if self._elastic:
            self._elastic.observe(state, now, speed)
        return True

    def place(self, turn: FirstTurn, now: float) -> Placement | Refusal:
        settings = self.settings
        need = turn.prompt_tokens + settings.headroom_tokens
        decoder = self._decoders.choose(need, turn.preferred_decoder)
        if decoder is None:
            return self._on_a_prefiller(turn, need, now) or self._no_decoder_for(need)
        estimates, cached = None, self._cached(turn, now)
        uncached = turn.prompt_tokens - cached.get(decoder.chosen.engine, 0)
        if not settings.policy.disaggregates:
            prefiller = _no_prefiller(Why.PREFILLED_LOCALLY)
        elif decoder.chosen.engine in self._split:
            prefiller = _no_prefiller(Why.SHARES_LAYERS)
        elif turn.had_decoder and settings.shared_tier:
            prefiller = _no_prefiller(Why.RESTORED)
        else:
            found = self._prefillers.choose(turn.prompt_tokens, now, turn.ahead_s)
            if found is None and not settings.local_prefill_without_prefiller:
                return refuse(RefusalReason.NO_PREFILLER, settings.retry_no_engine_s)
            prefiller = found or _no_prefiller(Why.NO_PREFILLER_UP)
            asked = AskedPrompt(turn.prompt_tokens, turn.ahead_s, now)
            prefiller = with_beginning(prefiller, self._prefillers, asked, cached)
            if turn.heads:
                prefiller = keeping_beginnings(prefiller, self._prefillers, asked, turn.heads, self._shared)
            decoder = self._soonest(decoder, prefiller, turn, cached, now)
            uncached = turn.prompt_tokens - cached.get(decoder.chosen.engine, 0)
            prefiller, estimates = self._sooner(prefiller, decoder, uncached)
            wait_s = prefiller.chosen.wait_s if prefiller.chosen else 0.0
            if wait_s > (limit_s := settings.max_prefill_wait_s):
                with_time = self._decoder_with_time(decoder, need, turn.prompt_tokens)
                if with_time is None:
                    # The queue is a known number of seconds long: when it is short enough again is known.
                    return refuse(RefusalReason.SATURATED, wait_s - limit_s, wait_s=wait_s, limit_s=limit_s)
                decoder, prefiller = with_time, _without(prefiller, Why.PREFILLERS_SATURATED)
                uncached = turn.prompt_tokens - cached.get(decoder.chosen.engine, 0)
        sizes = Sizes(turn.prompt_tokens, uncached, need)
        placement = self._commit(turn, sizes, prefiller, decoder, now, estimates)
        engine, expected = placement.decoder, cached.get(placement.decoder, 0)
        if (first := prefiller.chosen) is not None:
            self._shared.given(turn.key, turn.heads, engine, turn.prompt_tokens, now)
            engine, expected = first.engine, first.cached_tokens
        self._shared.computing(turn.key, engine, turn.heads, turn.prompt_tokens, expected, now)
        self._shared.began(turn.key, turn.heads, new=not turn.had_decoder, shared=turn.shared)
        return placement

    def place_later(self, turn: LaterTurn, now: float) -> Placement:
        """A later turn never moves and is never refused; it may go through a prefiller again."""
        settings = self.settings
        held_by = self._decoders if turn.decoder in self._decoders else self._last_resort
        option = held_by.option(turn.decoder)
        decoder = DecoderChoice(Why.BOUND, option, (), len(self._decoders), 0)
        prefiller, estimates = _no_prefiller(Why.PREFILLED_LOCALLY), None
        large = self.through_prefiller(turn.uncached_tokens, turn.prompt_tokens)
        if large and turn.decoder in self._split:
            prefiller = _no_prefiller(Why.SHARES_LAYERS)
        elif large and held_by is self._decoders:
            found = self._prefillers.choose(turn.prompt_tokens, now, turn.ahead_s)
            prefiller = found or _no_prefiller(Why.NO_PREFILLER_UP)
            if self._elastic:
                has = {turn.prefix_on: turn.prefix_tokens}
                asked = AskedPrompt(turn.prompt_tokens, turn.ahead_s, now)
                prefiller = with_beginning(prefiller, self._prefillers, asked, has)
                prefiller, estimates = self._sooner(prefiller, decoder, turn.uncached_tokens)
            elif (first := prefiller.chosen) is not None:
                longest = settings.policy.later_turn_waits(first.prefill_s, settings.max_prefill_wait_s)
                if first.wait_s > longest:
                    prefiller = _no_prefiller(Why.PREFILLERS_BUSY)
        need = turn.uncached_tokens + settings.headroom_tokens if prefiller.chosen else 0
        sizes = Sizes(turn.prompt_tokens, turn.uncached_tokens, need)
        return self._commit(turn, sizes, prefiller, decoder, now, estimates)

    def through_prefiller(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        """Whether a later turn has to be placed at all: most have not, and need only their binding."""
        settings = self.settings
        return settings.policy.later_turn_through_prefiller(
            settings.redisaggregation, uncached_tokens, prompt_tokens
        )

    def prefill_done(self, key: str, now: float, tokens: int = 0, cached: int | None = None) -> None:
        """`tokens`: of the prompt that the prefiller computed, from which its curve learns; 0: it did not, or
        who knows. It had `cached` of them; None: it does not say."""
        self._prefillers.computed(key, tokens, now, cached or 0)
        if tokens:
            self._shared.computed(key, cached)
        else:
            self._shared.not_computed(key)
        if self._elastic:
            self._elastic.done(key)

    def turn_ended(self, key: str, engine: str, tokens: int, now: float, cached: int | None = None) -> None:
        """So many tokens of the conversation are on its decoder. If that computed the turn's prompt itself,
        it had `cached` of it; None: it does not say, or has not."""
        self._shared.computed(key, cached)
        self._shared.grew(key, engine, tokens, now)

    def prefill_began(self, key: str) -> None:
        """It is no second thought any more."""
        if self._elastic:
            self._elastic.begun(key)

    def transferred(self, tokens: int, seconds: float) -> None:
        """What of a transfer was not hidden: from the end of a prefill to the start on the decoder."""
        if self._elastic:
            self._elastic.transferred(tokens, seconds)

    def second_thoughts(self, decoder: str, now: float) -> tuple[str, ...]:
        """Turns that wait for a prefiller and whose first token would come sooner from this, their decoder.

        Who asks takes the first of them back whose prefill has not begun, and says so with `taken_back`.
        """
        if self._elastic is None:
            return ()
        sooner = []
        for key, tokens in self._elastic.waiting_for_prefillers(decoder):
            if (prefiller := self._prefillers.engine_of(key)) is None:
                continue
            left_s = self._elastic.remote_s(prefiller, self._prefillers.remaining_s(key, now), tokens)
            if self._elastic.estimates(decoder, tokens, None).local_s < left_s:
                sooner.append(key)
        return tuple(sooner)

    def taken_back(self, key: str, decoder: str, tokens: int, now: float) -> None:
        """A prefill leaves its queue: its decoder computes the prompt."""
        self._prefillers.done(key, now)
        self._shared.not_computed(key)
        if self._elastic:
            self._elastic.goes_local(key, decoder, tokens, now)

    def release(self, key: str, now: float) -> None:
        """The conversation ended, or its placement was not used."""
        self._prefillers.done(key, now)
        self._shared.ended(key)
        self._decoders.release(key)
        self._last_resort.release(key)
        if self._elastic:
            self._elastic.done(key)

    def to_compute(self, prompt_tokens: int, heads: Sequence[Head], now: float) -> int:
        """Of a first turn that has no place yet, what no engine has of its prompt, by estimate."""
        return prompt_tokens - min(max(self._shared.on(heads, now).values(), default=0), prompt_tokens - 1)

    def arrived(self, prompt_tokens: int, now: float) -> None:
        """A turn that wants a prefiller came, once, whether or not it can be placed."""
        if not self.settings.policy.disaggregates:
            return
        seconds = self._prefillers.mean_prefill_s(prompt_tokens)
        if seconds is None:  # none is up: what one of them would need
            curve = next(iter(self._curves.values()), None)
            seconds = curve.seconds(prompt_tokens) if curve else 0.0
        self._watch.arrived(seconds, now)

    def look(self, now: float, refused: Sequence[int] = ()) -> OverloadState:
        """Time for the averages to take in how full the decoders are; first prompts of `refused` tokens wait
        for one."""
        self._watch.observed(self._decoders.pressure(), now)
        needs = [tokens + self.settings.headroom_tokens for tokens in refused]
        return self._overload.observe(self._decoders.demand(needs), now)

    def _note_split(self, state: EngineState, whole: int) -> None:
        now = state.split.kv_tokens if state.split is not None and state.split.epoch else 0
        if state.engine in self._decoders and now != self._split.get(state.engine, 0):
            self.resized(state.engine, now or whole)
            self._split.pop(state.engine, None)
            if now:
                self._split[state.engine] = now

    def resized(self, engine: str, kv_tokens: int) -> None:
        self._decoders.resize(engine, int(kv_tokens * self.settings.fill))

    def signals(self, running_tokens: int, now: float) -> Signals:
        """`running_tokens`: of conversations with a turn under way."""
        wait_s = self._prefillers.shortest_wait_s(now)
        running = running_tokens / max(1.0, self._decoders.limit())
        found = self._watch.signals(self._prefillers.open(), wait_s, self._decoders.open(), running, now)
        if self._elastic is None:
            return found
        return replace(found, lent=self._elastic.lent(one for one in self._infos if one in self._decoders))

    def prefill_wait_s(self, engine: str, now: float) -> float:
        return self._prefillers.wait_s(engine, now)

    def kv_in_use(self, engine: str) -> int:
        return (self._last_resort if engine in self._last_resort else self._decoders).option(engine).kv_in_use

    def _sooner(
        self, prefiller: PrefillerChoice, decoder: DecoderChoice, tokens: int
    ) -> tuple[PrefillerChoice, Estimates | None]:
        """Elastic: without the prefiller where the decoder is sooner; `tokens` is what that would compute."""
        if self._elastic is None:
            return prefiller, None
        estimates = self._elastic.estimates(decoder.chosen.engine, tokens, prefiller.chosen)
        if prefiller.chosen is not None and estimates.local_first:
            prefiller = _without(prefiller, Why.SOONER_ON_DECODER)
        return prefiller, estimates

    def _soonest(
        self,
        least: DecoderChoice,
        prefiller: PrefillerChoice,
        turn: FirstTurn,
        cached: Mapping[str, int],
        now: float,
    ) -> DecoderChoice:
        """Elastic: of the decoders with the least KV, the one that computes the prompt soonest, if that is
        clearly sooner than on the first and on a prefiller, what it has to compute again counted."""
        if self._elastic is None or least.why is not Why.LEAST_KV_IN_USE:
            return least
        if least.without_capacity > self.settings.sooner_full * least.considered:
            return least
        tokens = {
            one.engine: turn.prompt_tokens - cached.get(one.engine, 0)
            for one in (least.chosen, *least.runners_up)
            if one.engine not in self._split
        }
        costs_s = {name: self._elastic.estimates(name, few, None).local_s for name, few in tokens.items()}
        if turn.heads:
            for name, few in tokens.items():
                if lost := self._shared.displaced(name, turn.heads, few, now):
                    costs_s[name] += RECOMPUTE_COST * self._elastic.alone_s(name, lost)
        best = min(costs_s, key=costs_s.__getitem__)
        sooner = costs_s[best] < self.settings.sooner_share * costs_s[least.chosen.engine]
        if not (sooner and self._elastic.estimates(best, tokens[best], prefiller.chosen).local_first):
            return least
        return self._instead(least, best, Why.SOONER_WITH_CAPACITY)

    def _decoder_with_time(self, decoder: DecoderChoice, need: int, tokens: int) -> DecoderChoice | None:
        """Elastic: this one, or the first that it fits on, whose own prompts are soon through."""
        first, limit_s = decoder.chosen.engine, self.settings.max_prefill_wait_s
        for name in (first, *self._decoders.fitting(need)) if self._elastic else ():
            if self._elastic and self._elastic.local_wait_s(name, tokens) <= limit_s:
                return decoder if name == first else self._instead(decoder, name, Why.HAS_TIME)
        return None

    def _instead(self, decoder: DecoderChoice, engine: str, why: Why) -> DecoderChoice:
        """Another of those that it fits on is the chosen one."""
        seen = (decoder.chosen, *decoder.runners_up)
        others = tuple(one for one in seen if one.engine != engine)
        return decoder._replace(why=why, chosen=self._decoders.option(engine), runners_up=others)

    def _cached(self, turn: FirstTurn, now: float) -> dict[str, int]:
        """Of its prompt, what engines have, by estimate; the last token is computed again in any case."""
        most = turn.prompt_tokens - 1
        return {name: min(had, most) for name, had in self._shared.on(turn.heads, now).items()}

    def _on_a_prefiller(self, turn: FirstTurn, need: int, now: float) -> Placement | None:
        """The last resort, before anything is refused: a prefiller computes the conversation and holds it."""
        holder = self._last_resort.choose(need, None)
        if holder is None:
            return None
        holder, none = holder._replace(why=Why.LAST_RESORT), _no_prefiller(Why.PREFILLED_LOCALLY)
        self._last_resort.reserve(holder.chosen.engine, turn.key, need)
        policy, overload = self.settings.policy, self._overload.state.declared
        receipt = Receipt(policy, now, turn.prompt_tokens, need, none, holder, overload=overload)
        return Placement(None, holder.chosen.engine, receipt)

    def _commit(
        self,
        turn: FirstTurn | LaterTurn,
        sizes: Sizes,
        prefiller: PrefillerChoice,
        decoder: DecoderChoice,
        now: float,
        estimates: Estimates | None,
    ) -> Placement:
        key, engine = turn.key, decoder.chosen.engine
        if sizes.need:
            self._decoders.reserve(engine, key, sizes.need)
        if prefiller.chosen is not None:
            first = prefiller.chosen
            self._prefillers.enqueue(first.engine, key, first.prefill_s, now, turn.ahead_s)
        if self._elastic:
            goes = self._elastic.goes_local if prefiller.chosen is None else self._elastic.goes_remote
            goes(key, engine, sizes.uncached, now)
        policy, overload = self.settings.policy, self._overload.state.declared
        receipt = Receipt(policy, now, sizes.prompt, sizes.need, prefiller, decoder, estimates, overload)
        name = prefiller.chosen.engine if prefiller.chosen else None
        return Placement(name, engine, receipt)

    def _no_decoder_for(self, need: int) -> Refusal:
        if not len(self._decoders):
            return refuse(RefusalReason.NO_DECODER, self.settings.retry_no_engine_s)
        if not self._decoders.could_ever_hold(need):
            return refuse(RefusalReason.TOO_LARGE, 0.0, tokens=need)
        retry_s, decoders = self.settings.retry_no_capacity_s, len(self._decoders)
        return refuse(RefusalReason.NO_CAPACITY, retry_s, tokens=need, decoders=decoders)


def _without(prefiller: PrefillerChoice, why: Why) -> PrefillerChoice:
    """The best of them is not taken after all."""
    seen = (prefiller.chosen, *prefiller.runners_up) if prefiller.chosen else prefiller.runners_up
    return PrefillerChoice(why, None, seen, prefiller.considered)


def _no_prefiller(why: Why) -> PrefillerChoice:
    return PrefillerChoice(why, None, (), 0)
