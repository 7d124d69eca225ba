"""Elastic placement: follow the paper's rule unless another engine gives the first token clearly sooner.

Normally a prefiller computes a turn's prompt, because turns on a decoder would wait behind that prompt. The
decoder computes the prompt in two cases: its first token would come within half of the prefiller's time, or
the prefiller would put the TTFT target at risk and the decoder is clearly sooner. While KV is short, a
slightly sooner decoder suffices in the second case. Another decoder than the one with the least KV in use is
chosen if it would compute the prompt in clearly less time. A prefiller holds a conversation that fits on no
decoder.

The estimate for a prefiller uses its queue, its curve, and the measured part of transfers that prefill did
not hide. The estimate for a decoder uses the prompts that wait there, its recent speed, and the share of its
time that the TBT targets of its running turns leave to prompts.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf, pow

from placement.engines import EngineInfo, EngineState
from placement.routing.decoder_pool import DecoderPool, KvFill
from placement.routing.engine_speed import EngineSpeed
from placement.routing.least_kv import EngineChoice, FirstTurn, LaterTurn, LeastKvRule, RoutingState
from placement.routing.placer_settings import PrefillerRoles
from placement.routing.prefill_queue import TYPICAL_TOKENS
from placement.routing.prefiller_roles import IdlePrefillers
from placement.routing.receipts import (
    DecoderChoice,
    Estimates,
    PrefillerChoice,
    PrefillerOption,
    Refusal,
    Why,
)
from placement.scheduling.prefill_curve import PrefillCurve
from placement.sizing.capacity import Signals

# Found by simulation (docs/simulation.md). A decoder computes a prompt if its first token comes within this
# share of the prefiller's time. A larger share applies where the prefiller puts the TTFT target at risk, and
# the largest one if KV is short, too.
LOCAL_SHARE, SOONER_SHARE, SOONER_SHARE_KV_SHORT = 0.5, 0.8, 0.95
AT_RISK = 0.6  # a prefiller that takes more than this share of the TTFT target puts it at risk
MANY_FULL = 0.25  # if a larger share of the decoders is full, KV is short and only the KV in use counts
OWN_FILL = 0.75  # share of a prefiller's KV for conversations of its own
# How long a measured transfer cost counts fully. Its weight then halves each time that this passes again.
TRANSFER_COST_KEPT_S = 20.0
MOST_RETRIES = 4  # each retry that confirms the cost lets it count four times as long, up to 1.4 hours
REACHES_ENGINE_S = 0.5  # a turn placed longer ago is in the engine's own report
LEAST_SHARE = 0.05  # least share of an engine's time that its prompts are assumed to get
REPLACED_PER_TRANSFER = 0.1  # share of the known transfer cost that each new transfer replaces


def kv_is_short(decoder: DecoderChoice) -> bool:
    """Return whether many of the decoders that were considered have no capacity for the turn."""
    return decoder.without_capacity > MANY_FULL * decoder.considered


def why_local(estimates: Estimates, ttft_s: float, kv_short: bool = False) -> Why | None:
    """Return why the decoder should compute a prompt itself, or None if the prefiller should."""
    local_s, remote_s = estimates
    if remote_s is None or local_s <= LOCAL_SHARE * remote_s:
        return Why.SOONER_ON_DECODER
    share = SOONER_SHARE_KV_SHORT if kv_short else SOONER_SHARE
    at_risk = remote_s > AT_RISK * ttft_s
    return Why.TTFT_AT_RISK if at_risk and local_s <= share * remote_s else None


@dataclass(slots=True)
class PromptBacklog:
    """Prompts that wait on one engine: those in its report, and those placed there since the report."""

    curve: PrefillCurve | None  # None: only the engine's rate is known, if anything
    waiting_tokens: int = 0
    tokens_per_s: float = 0.0  # 0: it has computed no prompt lately
    share: float = 1.0  # share of the engine's time that running turns leave to prompts
    placed: dict[str, tuple[int, float]] = field(default_factory=dict)  # conversation -> tokens, placed at

    def first_token_s(self, tokens: int) -> float:
        """Return the seconds until a prompt's first token, infinite if the engine's speed is unknown."""
        return self.alone_s(tokens) + self.wait_s(tokens)

    def wait_s(self, tokens: int) -> float:
        """Return how long a prompt of `tokens` waits for the prompts before it, 0 if there are none."""
        ahead = self.waiting_tokens + sum(tokens for tokens, _ in self.placed.values())
        if not ahead:
            return 0.0
        rate = self.tokens_per_s or tokens / self.alone_s(tokens)
        return ahead / rate if rate else inf

    def alone_s(self, tokens: int) -> float:
        """Return the prefill time of a prompt that does not wait."""
        if self.curve is not None:
            return self.curve.seconds(tokens) / max(self.share, LEAST_SHARE)
        return tokens / self.tokens_per_s if self.tokens_per_s else inf


@dataclass(slots=True)
class TransferCost:
    """Estimated cost of a transfer: the seconds per token that the prefill does not hide.

    The cost fades while there are no transfers. A high cost came more often from a busy decoder than from a
    slow link, and must not prevent the transfers that would show a lower cost. A transfer after the cost has
    begun to fade is a retry. Each retry that confirms the cost makes it fade later.
    """

    s_per_token: float | None = None
    now: float = 0.0
    _measured_at: float = 0.0
    _retries: int = 0

    def measured(self, tokens: int, seconds: float) -> None:
        found, known = seconds / max(1, tokens), self.s_per_token
        share = max(REPLACED_PER_TRANSFER, 1 - self._confidence())
        self.s_per_token = found if known is None else known + share * (found - known)
        if known is not None and self.now - self._measured_at >= self._kept_s():
            self._retries = min(self._retries + 1, MOST_RETRIES) if found >= known else 0
        self._measured_at = self.now

    def seconds(self, tokens: int) -> float:
        return tokens * self._confidence() * (self.s_per_token or 0.0)

    def _confidence(self) -> float:
        """Return how much the last measured cost still counts: 1 at first, and towards 0 as it ages."""
        return pow(0.5, max(0.0, (self.now - self._measured_at) / self._kept_s() - 1))

    def _kept_s(self) -> float:
        return TRANSFER_COST_KEPT_S * pow(4.0, self._retries)


class ElasticRule(LeastKvRule):
    def __init__(self, state: RoutingState) -> None:
        super().__init__(state)
        self._backlogs: dict[str, PromptBacklog] = {}
        self._placed_on: dict[str, str] = {}  # conversation -> engine, placed and not reported yet
        self._transfer_cost = TransferCost()
        self._own = DecoderPool()  # prefillers, with the conversations that they hold
        self._held_by: dict[str, str] = {}  # conversation -> prefiller that took it while idle
        self._held_on = Counter[str]()  # prefiller -> number of these conversations
        self._idle = IdlePrefillers(state.settings.ttft_s)

    def first_turn(self, turn: FirstTurn, now: float) -> EngineChoice | Refusal:
        choice = self.find(turn, now)
        if isinstance(choice, Refusal):
            return self._on_a_prefiller(turn, now) or choice
        if choice.prefiller.why in (Why.SHARES_LAYERS, Why.RESTORED):
            return choice
        if (own := self._on_an_idle_prefiller(choice, turn, now)) is not None:
            return own
        choice = choice._replace(decoder=self._soonest_decoder(choice, turn))
        cached = choice.cached.get(choice.decoder.chosen.engine, 0)
        choice = self._where_sooner(choice, turn.prompt_tokens - cached)
        checked = self.unless_saturated(choice)
        if isinstance(checked, Refusal):
            return self._on_a_decoder_with_time(choice, turn) or checked
        return checked

    def later_turn(self, turn: LaterTurn, now: float) -> EngineChoice:
        if turn.decoder in self._own:
            option = self._own.option(turn.decoder)
            holder = DecoderChoice(Why.BOUND, option, (), len(self.state.decoders), 0)
            return EngineChoice(holder, PrefillerChoice.none(Why.PREFILLED_LOCALLY), self._own, {})
        choice = self.find_later(turn, now)
        if choice.prefiller.why in (Why.SHARES_LAYERS, Why.PREFILLED_LOCALLY):
            return choice
        prefiller = self.state.prefillers.prefer_cached(
            choice.prefiller, turn.prompt_tokens, choice.cached, now, turn.queue_weight
        )
        return self._where_sooner(choice._replace(prefiller=prefiller), turn.uncached_tokens)

    def estimate(self, decoder: str, tokens: int, prefiller: PrefillerOption | None) -> Estimates:
        """Estimate the first token's time if the decoder computes `tokens` or gets them from `prefiller`."""
        remote_s = None
        if prefiller is not None:
            remote_s = self._prefill_s(prefiller, tokens) + self._transfer_cost.seconds(tokens)
        return Estimates(self._backlogs[decoder].first_token_s(tokens), remote_s)

    def _prefill_s(self, prefiller: PrefillerOption, tokens: int) -> float:
        """Return the seconds until a prompt of `tokens` is computed on a prefiller, beside its own turns."""
        backlog, wait_s = self._backlogs[prefiller.engine], prefiller.wait_s
        if self._held_on[prefiller.engine]:
            wait_s = max(wait_s, backlog.wait_s(tokens))  # prompts of its own turns are in no `PrefillQueues`
        return (wait_s + prefiller.prefill_s) / max(backlog.share, LEAST_SHARE)

    def _where_sooner(self, choice: EngineChoice, tokens: int) -> EngineChoice:
        """Return the choice, without its prefiller if the decoder would compute `tokens` clearly sooner."""
        best = choice.prefiller.chosen
        estimates = self.estimate(choice.decoder.chosen.engine, tokens, best)
        why = why_local(estimates, self.state.settings.ttft_s, kv_is_short(choice.decoder))
        if best is None or why is None:
            return choice._replace(estimates=estimates)
        return choice._replace(prefiller=choice.prefiller.rejected(why), estimates=estimates)

    def _soonest_decoder(self, choice: EngineChoice, turn: FirstTurn) -> DecoderChoice:
        """Return the choice of the decoder with the least KV, or of a runner-up that is clearly sooner.

        The runner-up must also be better than the prefiller (`why_local`). Where many decoders are full, KV
        is short, and only the KV in use counts.
        """
        least = choice.decoder
        if least.why is not Why.LEAST_KV_IN_USE or kv_is_short(least):
            return least
        options = {
            one.engine: one
            for one in (least.chosen, *least.runners_up)
            if one.engine not in self.state.split_kv
        }
        tokens = {name: turn.prompt_tokens - choice.cached.get(name, 0) for name in options}
        seconds = {name: self._backlogs[name].first_token_s(count) for name, count in tokens.items()}
        best = min(seconds, key=seconds.__getitem__)
        clearly = seconds[best] < SOONER_SHARE * seconds[least.chosen.engine]
        estimates = self.estimate(best, tokens[best], choice.prefiller.chosen)
        if clearly and why_local(estimates, self.state.settings.ttft_s):
            return least.replaced(options[best], Why.SOONER_WITH_CAPACITY)
        return least

    def _on_an_idle_prefiller(self, choice: EngineChoice, turn: FirstTurn, now: float) -> EngineChoice | None:
        """Return a choice that gives the conversation to an idle prefiller, or None if this is not better.

        The prefiller must have less KV in use than the best decoder, and no other engine may be clearly
        sooner.
        """
        least, taking, tokens = choice.decoder, self._idle.taking, turn.prompt_tokens
        if not taking or least.why is not Why.LEAST_KV_IN_USE:
            return None
        engine = next((name for name in self._own.fitting(self.state.need(turn)) if name in taking), None)
        if engine is None or (option := self._own.option(engine)).kv_in_use >= least.chosen.kv_in_use:
            return None
        cached, weight = choice.cached.get(engine, 0), turn.queue_weight
        queue = self.state.prefillers.option(engine, tokens, now, cached, weight)
        if queue is None:
            return None
        own_s = self._prefill_s(queue, tokens)
        cached = choice.cached.get(least.chosen.engine, 0)
        local_s, remote_s = self.estimate(least.chosen.engine, tokens - cached, choice.prefiller.chosen)
        if min(local_s, own_s if remote_s is None else remote_s) < SOONER_SHARE * own_s:
            return None
        decoder, prefiller = least.replaced(option, Why.IDLE_PREFILLER), choice.prefiller
        return EngineChoice(
            decoder,
            prefiller.rejected(Why.PREFILLED_LOCALLY),
            self._own,
            choice.cached,
            Estimates(own_s, remote_s),
        )

    def _on_a_decoder_with_time(self, choice: EngineChoice, turn: FirstTurn) -> EngineChoice | None:
        """Return the choice with a decoder whose queue is short enough for the prompt, or None without one.

        The decoder of `choice` is preferred.
        """
        first, limit_s = choice.decoder.chosen.engine, self.state.settings.max_prefill_wait_s
        for name in (first, *self.state.decoders.fitting(self.state.need(turn))):
            if self._backlogs[name].wait_s(turn.prompt_tokens) <= limit_s:
                decoder = choice.decoder
                if name != first:
                    decoder = decoder.replaced(self.state.decoders.option(name), Why.HAS_TIME)
                prefiller = choice.prefiller.rejected(Why.PREFILLERS_SATURATED)
                return choice._replace(decoder=decoder, prefiller=prefiller)
        return None

    def _on_a_prefiller(self, turn: FirstTurn, now: float) -> EngineChoice | None:
        """Return a choice of a prefiller that holds the conversation, or None if it fits on none."""
        holder = self._own.choose(self.state.need(turn), None)
        if holder is None:
            return None
        holder, prefiller = holder._replace(why=Why.LAST_RESORT), PrefillerChoice.none(Why.PREFILLED_LOCALLY)
        return EngineChoice(holder, prefiller, self._own, self.state.cached_tokens(turn, now))

    # Events

    def engine_up(self, info: EngineInfo, curve: PrefillCurve | None) -> None:
        self._backlogs[info.engine] = PromptBacklog(curve)
        if info.engine in self.state.prefillers:
            self._own.add(info.engine, int(info.kv_tokens * OWN_FILL))

    def engine_down(self, engine: str) -> tuple[str, ...]:
        self._backlogs.pop(engine, None)
        self._idle.remove(engine)
        self._held_by = {key: name for key, name in self._held_by.items() if name != engine}
        self._held_on.pop(engine, None)
        self._placed_on = {key: name for key, name in self._placed_on.items() if name != engine}
        return self._own.remove(engine) if engine in self._own else ()

    def observe(self, state: EngineState, last_seq: int, speed: EngineSpeed, now: float) -> None:
        self._transfer_cost.now = now
        backlog = self._backlogs[state.engine]
        if speed.estimate is not None and speed.measured:
            backlog.curve = speed.estimate
        backlog.waiting_tokens = state.waiting_prompt_tokens
        backlog.tokens_per_s, backlog.share = speed.tokens_per_s, state.prompt_share
        for key, (_, at) in tuple(backlog.placed.items()):
            if key in state.confirmed or at < now - REACHES_ENGINE_S:
                self._forget_prompt(key)
        if state.engine in self._own:
            self._own.observe(state, last_seq)
        if self.state.settings.roles is PrefillerRoles.FIXED:
            return
        if state.engine in self.state.prefillers:
            idle = not state.running and not state.waiting and not state.draining
            self._idle.prefiller_reported(state.engine, idle, now)
        else:
            self._idle.decoder_reported(state.engine, backlog.wait_s(TYPICAL_TOKENS), now)

    def placed(self, key: str, choice: EngineChoice, uncached: int, now: float) -> None:
        self._forget_prompt(key)
        if choice.decoder.why is Why.IDLE_PREFILLER and key not in self._held_by:
            self._held_by[key] = choice.decoder.chosen.engine
            self._held_on[choice.decoder.chosen.engine] += 1
        prefiller = choice.prefiller.chosen
        engine = choice.decoder.chosen.engine if prefiller is None else prefiller.engine
        self._backlogs[engine].placed[key] = uncached, now
        self._placed_on[key] = engine

    def transferred(self, tokens: int, seconds: float) -> None:
        self._transfer_cost.measured(tokens, seconds)

    def release(self, key: str) -> None:
        self._forget_prompt(key)
        self._own.release(key)
        if (holder := self._held_by.pop(key, None)) is not None:
            self._held_on[holder] -= 1

    def pool_of(self, engine: str) -> DecoderPool:
        return self._own if engine in self._own else self.state.decoders

    @property
    def role_changes(self) -> int:
        return self._idle.changes

    def kv_fill(self) -> KvFill:
        return super().kv_fill() + self._own.fill(self._idle.taking)

    def with_roles(self, signals: Signals) -> Signals:
        kept = [1 - self._backlogs[name].share for name in self._backlogs if name in self._own]
        decoders = [one for name, one in self._backlogs.items() if name in self.state.decoders]
        # The wait on an engine that has computed no prompt yet is infinite, that is, unknown.
        waits = [wait for one in decoders if (wait := one.wait_s(TYPICAL_TOKENS)) < inf]
        return replace(
            signals,
            lent=sum(one.share for one in decoders),
            kept=sum(kept),
            taking=len(self._idle.taking),
            decoder_wait_s=sum(waits) / len(waits) if waits else 0.0,
        )

    def _forget_prompt(self, key: str) -> None:
        """Stop counting a prompt as placed, because it was computed or the engine now reports it."""
        if (engine := self._placed_on.pop(key, None)) is not None:
            del self._backlogs[engine].placed[key]
