"""Where a turn goes: the placer keeps the two observed signals and answers from them.

It owns the prefillers' queues and the decoders' KV in use, does no I/O and has no clock. The directory calls
it in production, the simulator in simulation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from placement import admission
from placement.admission import Refusal, RefusalReason
from placement.capacity import CapacityWatch, Signals
from placement.curve import PrefillCurve
from placement.decoders import Decoders
from placement.engines import EngineInfo, EngineState
from placement.policies import PlacingPolicy
from placement.prefillers import Prefillers
from placement.receipt import DecoderChoice, PrefillerChoice, Receipt, Why
from placement.redisaggregation import Redisaggregation

__all__ = ["FirstTurn", "LaterTurn", "Placement", "Placer", "PlacerSettings", "Refusal", "RefusalReason"]


class MissingCurve(LookupError):
    """A prefiller's tier has no prefill curve."""


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    headroom_tokens: int = 1024  # reserved beyond the prompt, for the first answers
    fill: float = 0.9  # share of a decoder's KV that may be in use, what can give way not counted
    max_prefill_wait_s: float = 30.0
    retry_no_room_s: float = 5.0
    retry_no_engine_s: float = 10.0
    local_prefill_without_prefiller: bool = True
    shared_tier: bool = False  # decoders find KV of a conversation that another decoder had
    capacity_window_s: float = 60.0  # over which the two signals are averaged for `signals`
    forget_prefill_after_s: float = 5.0  # an idle prefiller's unreported ends
    redisaggregation: Redisaggregation = field(default_factory=Redisaggregation)


@dataclass(frozen=True, slots=True)
class FirstTurn:
    key: str
    prompt_tokens: int
    preferred_decoder: str | None = None  # of the parent or of the fork's origin
    had_decoder: bool = False  # it has been served; where it was, it cannot stay


@dataclass(frozen=True, slots=True)
class LaterTurn:
    key: str
    decoder: str  # where it is bound
    prompt_tokens: int
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    prefiller: str | None  # None: the decoder computes the prompt itself
    decoder: str
    reserved_tokens: int
    receipt: Receipt


class Placer:
    def __init__(self, settings: PlacerSettings, curves: Mapping[str, PrefillCurve]) -> None:
        """`curves` by tier of prefiller."""
        self._settings = settings
        self._curves = curves
        self._infos: dict[str, EngineInfo] = {}
        self._seqs: dict[str, int] = {}
        self._prefillers = Prefillers()
        self._decoders = Decoders()
        self._watch = CapacityWatch(settings.capacity_window_s)

    def engine_up(self, info: EngineInfo) -> tuple[str, ...]:
        """An engine, or a new epoch of one; returns the conversations whose promises on it are void."""
        policy = self._settings.policy
        if policy.prefills(info.role) and info.tier not in self._curves:
            raise MissingCurve(f"tier {info.tier!r} has no prefill curve; run `conserve profile`")
        lost = self.engine_down(info.engine)
        self._infos[info.engine] = info
        self._seqs[info.engine] = -1
        if policy.prefills(info.role):
            self._prefillers.add(info.engine, self._curves[info.tier])
        if policy.holds_conversations(info.role):
            self._decoders.add(info.engine, int(info.kv_tokens * self._settings.fill))
        return lost

    def engine_down(self, engine: str) -> tuple[str, ...]:
        """Returns the conversations whose queued prefill or reservation was on it."""
        if self._infos.pop(engine, None) is None:
            return ()
        lost: dict[str, None] = {}
        if engine in self._prefillers:
            lost |= dict.fromkeys(self._prefillers.remove(engine))
        if engine in self._decoders:
            lost |= dict.fromkeys(self._decoders.remove(engine))
        return tuple(lost)

    def observe(self, state: EngineState, now: float) -> bool:
        """Take in what an engine reports; False when it is of another epoch or out of order."""
        info = self._infos.get(state.engine)
        if info is None or state.epoch != info.epoch or state.seq <= self._seqs[state.engine]:
            return False
        self._seqs[state.engine] = state.seq
        if state.engine in self._prefillers:
            self._prefillers.set_draining(state.engine, state.draining)
            if state.running == 0 and state.waiting == 0:
                before = now - self._settings.forget_prefill_after_s
                self._prefillers.forget_placed_before(state.engine, before, now)
        if state.engine in self._decoders:
            self._decoders.observe(state)
        return True

    def place(self, turn: FirstTurn, now: float) -> Placement | Refusal:
        settings = self._settings
        need = turn.prompt_tokens + settings.headroom_tokens
        decoder = self._decoders.choose(need, turn.preferred_decoder)
        if decoder is None:
            return self._no_decoder_for(need)
        if not settings.policy.disaggregates:
            prefiller = _no_prefiller(Why.PREFILLED_LOCALLY)
        elif turn.had_decoder and settings.shared_tier:
            prefiller = _no_prefiller(Why.RESTORED)
        else:
            found = self._prefillers.choose(turn.prompt_tokens, now)
            if found is None and not settings.local_prefill_without_prefiller:
                return admission.no_prefiller(settings.retry_no_engine_s)
            prefiller = found or _no_prefiller(Why.NO_PREFILLER_UP)
            if prefiller.chosen is not None and prefiller.chosen.wait_s > settings.max_prefill_wait_s:
                return admission.saturated(prefiller.chosen.wait_s, settings.max_prefill_wait_s)
        return self._commit(turn.key, turn.prompt_tokens, need, prefiller, decoder, now)

    def place_later(self, turn: LaterTurn, now: float) -> Placement:
        """A later turn never moves and is never refused; it may go through a prefiller again."""
        settings = self._settings
        option = self._decoders.option(turn.decoder)
        decoder = DecoderChoice(Why.BOUND, option, (), len(self._decoders), 0)
        prefiller = _no_prefiller(Why.PREFILLED_LOCALLY)
        if self.through_prefiller(turn.uncached_tokens, turn.prompt_tokens):
            found = self._prefillers.choose(turn.prompt_tokens, now)
            prefiller = found or _no_prefiller(Why.NO_PREFILLER_UP)
            if (first := prefiller.chosen) is not None:
                longest = settings.policy.later_turn_waits(first.prefill_s, settings.max_prefill_wait_s)
                if first.wait_s > longest:
                    prefiller = _no_prefiller(Why.PREFILLERS_BUSY)
        need = turn.uncached_tokens + settings.headroom_tokens if prefiller.chosen else 0
        return self._commit(turn.key, turn.prompt_tokens, need, prefiller, decoder, now)

    def through_prefiller(self, uncached_tokens: int, prompt_tokens: int) -> bool:
        """Whether a later turn has to be placed at all: most have not, and need only their binding."""
        settings = self._settings
        return settings.policy.later_turn_through_prefiller(
            settings.redisaggregation, uncached_tokens, prompt_tokens
        )

    def prefill_done(self, key: str, now: float) -> None:
        self._prefillers.done(key, now)

    def release(self, key: str, now: float) -> None:
        """The conversation ended, or its placement was not used."""
        self._prefillers.done(key, now)
        self._decoders.release(key)

    def arrived(self, prompt_tokens: int, now: float) -> None:
        """A turn that wants a prefiller came, once, whether or not it can be placed."""
        if not self._settings.policy.disaggregates:
            return
        seconds = self._prefillers.mean_prefill_s(prompt_tokens)
        if seconds is None:  # none is up: what one of them would need
            curve = next(iter(self._curves.values()), None)
            seconds = curve.seconds(prompt_tokens) if curve else 0.0
        self._watch.arrived(seconds, now)

    def look(self, now: float) -> None:
        """Time for the averages of `signals` to take in how full the decoders are."""
        self._watch.observed(self._decoders.pressure(), now)

    def signals(self, running_tokens: int, now: float) -> Signals:
        """`running_tokens`: of conversations with a turn under way."""
        wait_s = self._prefillers.shortest_wait_s(now)
        running = running_tokens / max(1.0, self._decoders.limit())
        return self._watch.signals(self._prefillers.open(), wait_s, self._decoders.open(), running, now)

    def prefill_wait_s(self, engine: str, now: float) -> float:
        return self._prefillers.wait_s(engine, now)

    def kv_in_use(self, engine: str) -> int:
        return self._decoders.option(engine).kv_in_use

    def _commit(
        self, key: str, prompt: int, need: int, prefiller: PrefillerChoice, decoder: DecoderChoice, now: float
    ) -> Placement:
        if need:
            self._decoders.reserve(decoder.chosen.engine, key, need)
        if prefiller.chosen is not None:
            self._prefillers.enqueue(prefiller.chosen.engine, key, prefiller.chosen.prefill_s, now)
        receipt = Receipt(self._settings.policy, now, prompt, need, prefiller, decoder)
        name = prefiller.chosen.engine if prefiller.chosen else None
        return Placement(name, decoder.chosen.engine, need, receipt)

    def _no_decoder_for(self, need: int) -> Refusal:
        if not len(self._decoders):
            return admission.no_decoder(self._settings.retry_no_engine_s)
        if not self._decoders.could_ever_hold(need):
            return admission.too_large(need)
        return admission.no_room(need, len(self._decoders), self._settings.retry_no_room_s)


def _no_prefiller(why: Why) -> PrefillerChoice:
    return PrefillerChoice(why, None, (), 0)
