"""Placer of turns: keeps the observed state of the fleet and applies a placement rule.

The directory runs it in production and the simulator in simulation. It does no I/O and has no clock.
"""

from collections.abc import Mapping, Sequence

from placement import PlacementError
from placement.engines import EngineInfo, EngineState
from placement.hot_decoders import HotDecoders
from placement.overload.signal import OverloadState, OverloadWatch
from placement.routing.decoder_pool import KvFill
from placement.routing.elastic import ElasticRule
from placement.routing.engine_speed import EngineSpeed, EngineSpeeds
from placement.routing.least_kv import (
    RETRY_NO_CAPACITY_S,
    EngineChoice,
    FirstTurn,
    LaterTurn,
    LeastKvRule,
    RoutingState,
)
from placement.routing.placer_settings import FirstTurns, PlacerSettings, PlacingPolicy
from placement.routing.prefix_map import PromptPrefix
from placement.routing.receipts import Move, Placement, Receipt, Refusal, RefusalReason, refuse
from placement.scheduling.prefill_curve import PrefillCurve
from placement.sizing.capacity import CapacityWatch, Signals

FORGET_PREFILL_AFTER_S = 5.0  # queued prompts older than this are forgotten if their prefiller is idle


class MissingCurve(PlacementError, LookupError):
    """Error: the tier of a prefiller has no prefill curve."""


class Placer:
    def __init__(
        self,
        settings: PlacerSettings,
        curves: Mapping[str, PrefillCurve],
        hardware_of: Mapping[str, str] | None = None,
    ) -> None:
        """Create a placer for an empty fleet.

        `curves` has a prefill curve for each tier of prefillers, and for tiers of decoders where one is
        known. They are used until engines report their own. `hardware_of` maps tiers of equal hardware to one
        name.
        """
        self.settings = settings
        self._curves = curves
        self._infos: dict[str, EngineInfo] = {}
        self._seqs: dict[str, int] = {}  # engine -> number of its last report
        self._speeds = EngineSpeeds(hardware_of or {})
        self._state = RoutingState(settings)
        elastic = settings.first_turns is FirstTurns.ELASTIC and settings.policy is PlacingPolicy.CONSERVE
        self._rule = ElasticRule(self._state) if elastic else LeastKvRule(self._state)
        self.hot = HotDecoders()
        self._capacity, self._overload = CapacityWatch(settings.capacity_window_s), OverloadWatch()

    # Engines

    def engine_up(self, info: EngineInfo) -> tuple[str, ...]:
        """Add an engine, or its new epoch; return the conversations lost with its former epoch."""
        policy, state, curve = self.settings.policy, self._state, self._curves.get(info.tier)
        if policy.prefills(info.role) and curve is None:
            raise MissingCurve(f"tier {info.tier!r} has no prefill curve; run `conserve profile`")
        lost = self.engine_down(info.engine)
        self._infos[info.engine] = info
        self._seqs[info.engine] = 0
        self._speeds.add(info.engine, info.tier)
        state.prefixes.set_kv_tokens(info.engine, info.kv_tokens)
        if policy.prefills(info.role) and curve is not None:
            state.prefillers.add_engine(info.engine, curve)
        if policy.holds_conversations(info.role):
            state.decoders.add(info.engine, int(info.kv_tokens * self.settings.fill))
        self._rule.engine_up(info, curve)
        return lost

    def engine_down(self, engine: str) -> tuple[str, ...]:
        """Remove an engine, and return the conversations whose queued prefill or reservation was there."""
        if self._infos.pop(engine, None) is None:
            return ()
        lost: dict[str, None] = {}
        state = self._state
        state.split_kv.pop(engine, None)
        self._speeds.remove(engine)
        self.hot.remove(engine)
        state.prefixes.forget_engine(engine)
        if engine in state.prefillers:
            lost |= dict.fromkeys(state.prefillers.remove_engine(engine))
        if engine in state.decoders:
            lost |= dict.fromkeys(state.decoders.remove(engine))
        lost |= dict.fromkeys(self._rule.engine_down(engine))
        return tuple(lost)

    def observe(self, report: EngineState, now: float) -> bool:
        """Apply an engine's report; return False if it is of another epoch or out of order."""
        info, state = self._infos.get(report.engine), self._state
        if info is None or report.epoch != info.epoch:
            return False
        if report.seq <= (last_seq := self._seqs[report.engine]):
            return False
        self._seqs[report.engine] = report.seq
        speed = self._speeds.observe(report, now)
        if report.engine in state.prefillers:
            if speed.reported is not None and speed.estimate is not None:
                state.prefillers.set_curve(report.engine, speed.reported, speed.estimate, speed.freshness)
            state.prefillers.set_draining(report.engine, report.draining)
            if report.running == 0 and report.waiting == 0:
                before = now - FORGET_PREFILL_AFTER_S
                state.prefillers.drop_placed_before(report.engine, before, now)
        if report.engine in state.decoders:
            state.decoders.observe(report, last_seq)
            if self.settings.relieve_hot:
                self._observe_wait(report, speed, now)
        self._observe_split(report, info.kv_tokens)
        kv_tokens = state.split_kv.get(report.engine, info.kv_tokens)
        state.prefixes.set_kv_tokens(report.engine, kv_tokens // report.kv_per_token)
        self._rule.observe(report, last_seq, speed, now)
        return True

    def _observe_wait(self, report: EngineState, speed: EngineSpeed, now: float) -> None:
        """Record how long prompts wait on a decoder, if it takes conversations and its speed is known."""
        tokens, engine = report.waiting_prompt_tokens, report.engine
        if report.draining or not (speed.tokens_per_s or speed.estimate):
            self.hot.remove(engine)
        elif speed.tokens_per_s:
            self.hot.observe(engine, tokens / speed.tokens_per_s, now)
        elif speed.estimate is not None:
            self.hot.observe(engine, speed.estimate.seconds(tokens) if tokens else 0.0, now)

    def _observe_split(self, report: EngineState, whole: int) -> None:
        """Resize a decoder that began or stopped sharing its layers."""
        kv_tokens = report.split.kv_tokens if report.split is not None and report.split.epoch else 0
        engine, split_kv = report.engine, self._state.split_kv
        if engine in self._state.decoders and kv_tokens != split_kv.get(engine, 0):
            self.resize(engine, kv_tokens or whole)
            split_kv.pop(engine, None)
            if kv_tokens:
                split_kv[engine] = kv_tokens

    def resize(self, engine: str, kv_tokens: int) -> None:
        self._state.decoders.resize(engine, int(kv_tokens * self.settings.fill))

    # Turns

    def place(self, turn: FirstTurn, now: float) -> Placement | Refusal:
        """Place a first turn, or refuse it; a refusal changes nothing."""
        choice = self._rule.first_turn(turn, now)
        if isinstance(choice, Refusal):
            return choice
        decoder, first, prefixes = choice.decoder.chosen.engine, choice.prefiller.chosen, self._state.prefixes
        uncached = turn.prompt_tokens - choice.cached.get(decoder, 0)
        placement = self._commit(turn, choice, self._state.need(turn), uncached, now)
        if first is not None:  # the decoder receives what the prefiller computes
            prefixes.record(turn.key, turn.prefixes, decoder, turn.prompt_tokens, now)
        engine = decoder if first is None else first.engine
        expected = choice.cached.get(decoder, 0) if first is None else first.cached_tokens
        prefixes.prompt_placed(turn.key, engine, turn.prefixes, turn.prompt_tokens, expected, now)
        return placement

    def place_moved(
        self, turn: FirstTurn, move: Move, now: float, target: str | None = None
    ) -> Placement | Refusal:
        """Place a later turn on another decoder than before, on `target` if this is not None.

        A refusal changes nothing.
        """
        choice = self._rule.move(turn, target) if move.sends else self._rule.first_turn(turn, now)
        if isinstance(choice, Refusal):
            return choice
        if choice.decoder.chosen.engine in self._state.split_kv:  # it cannot receive KV
            return refuse(RefusalReason.NO_CAPACITY, RETRY_NO_CAPACITY_S, tokens=0, decoders=0)
        uncached = 0 if move.sends else turn.prompt_tokens
        placement = self._commit(turn, choice, self._state.need(turn), uncached, now, move)
        self._state.prefixes.record(turn.key, turn.prefixes, placement.decoder, turn.prompt_tokens, now)
        return placement

    def place_later(self, turn: LaterTurn, now: float) -> Placement:
        """Place a later turn on its decoder, never refusing it. It may go through a prefiller again."""
        choice = self._rule.later_turn(turn, now)
        headroom = turn.answers * self.settings.headroom_tokens
        need = turn.uncached_tokens + headroom if choice.prefiller.chosen else 0
        return self._commit(turn, choice, need, turn.uncached_tokens, now)

    def prefill_done(self, key: str, now: float, tokens: int = 0, cached: int | None = None) -> None:
        """Record that a prefill ended, and correct the prefiller's curve by it.

        `tokens` is the length of the prompt, or 0 if the prefiller did not compute it. The prefiller had
        `cached` of these tokens in its cache, or None if it does not report that.
        """
        self._state.prefillers.prefill_ended(key, tokens, now, cached or 0)
        if tokens:
            self._state.prefixes.prompt_computed(key, cached)
        else:
            self._state.prefixes.prompt_not_computed(key)

    def turn_ended(self, key: str, engine: str, tokens: int, now: float, cached: int | None = None) -> None:
        """Record that a turn ended and left `tokens` of its conversation on the decoder `engine`.

        `cached` is how many tokens of the prompt this decoder had in its cache, or None if it did not compute
        the prompt or does not report that.
        """
        self._state.prefixes.prompt_computed(key, cached)
        self._state.prefixes.conversation_grew(key, engine, tokens, now)

    def transferred(self, tokens: int, seconds: float) -> None:
        """Record the `seconds` that a transfer of `tokens` took from prefill to the start of decoding."""
        self._rule.transferred(tokens, seconds)

    def release(self, key: str, now: float) -> None:
        """Forget a conversation that ended, or whose placement was not used."""
        self._state.prefillers.dequeue(key, now)
        self._state.prefixes.conversation_ended(key)
        self._state.decoders.release(key)
        self._rule.release(key)

    def _commit(
        self,
        turn: FirstTurn | LaterTurn,
        choice: EngineChoice,
        need: int,
        uncached: int,
        now: float,
        move: Move | None = None,
    ) -> Placement:
        """Reserve KV and a place in the queue on the chosen engines, and return the placement."""
        engine, first = choice.decoder.chosen.engine, choice.prefiller.chosen
        if need:
            choice.pool.reserve(engine, turn.key, need)
        if first is not None:
            prefillers = self._state.prefillers
            prefillers.enqueue(first.engine, turn.key, first.prefill_s, now, turn.queue_weight)
        self._rule.placed(turn.key, choice, uncached, now)
        receipt = Receipt(
            self.settings.policy,
            now,
            turn.prompt_tokens,
            need,
            choice.prefiller,
            choice.decoder,
            choice.estimates,
            self._overload.state.declared,
            move,
        )
        source = move.source if move is not None and move.sends else None
        return Placement(first.engine if first else source, engine, receipt)

    # Signals

    def uncached_tokens(self, prompt_tokens: int, prefixes: Sequence[PromptPrefix], now: float) -> int:
        """Estimate how many tokens of a prompt the engine with the longest cached prefix has to compute."""
        cached = max(self._state.prefixes.cached_tokens(prefixes, now).values(), default=0)
        return prompt_tokens - min(cached, prompt_tokens - 1)

    def prompt_arrived(self, prompt_tokens: int, now: float) -> None:
        """Add the prefill time of an arrived turn to the demand, whether or not the turn is placed."""
        if not self.settings.policy.disaggregates:
            return
        seconds = self._state.prefillers.mean_prefill_s(prompt_tokens)
        if seconds is None:  # no prefiller is up, so the curve of any tier has to do
            curve = next(iter(self._curves.values()), None)
            seconds = curve.seconds(prompt_tokens) if curve else 0.0
        self._capacity.arrived(seconds, now)

    def observe_overload(self, now: float, refused: Sequence[int] = ()) -> OverloadState:
        """Compare the decoders' KV with the demand, and return the new overload state.

        `refused` has the prompt tokens of each first turn that fits on no decoder.
        """
        decoders = self._state.decoders
        needs = [tokens + self.settings.headroom_tokens for tokens in refused]
        self._capacity.observed((self._rule.kv_fill() + KvFill(sum(needs), 0.0)).pressure, now)
        return self._overload.observe(decoders.demand(needs), now)

    def signals(self, running_tokens: int, now: float) -> Signals:
        """Return the capacity signals. `running_tokens` is the KV of conversations with a running turn."""
        decoders, prefillers = self._state.decoders, self._state.prefillers
        running_share = running_tokens / max(1.0, self._rule.kv_fill().limit)
        signals = self._capacity.signals(
            prefillers.open_count(),
            prefillers.shortest_wait_s(now),
            decoders.open_count(),
            running_share,
            now,
        )
        return self._rule.with_roles(signals)

    def prefill_wait_s(self, engine: str, now: float) -> float:
        return self._state.prefillers.wait_s(engine, now)

    @property
    def role_changes(self) -> int:
        """Return how often a prefiller started or stopped taking conversations."""
        return self._rule.role_changes

    def kv_in_use(self, engine: str) -> int:
        return self._rule.pool_of(engine).option(engine).kv_in_use
