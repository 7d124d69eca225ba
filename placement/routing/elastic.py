"""Elastic placing: a turn is computed where its first token comes first, on a prefiller or on its decoder.

Nothing is predicted but how long known tokens take: what is queued on a prefiller, its curve, and what of the
transfer was not hidden lately; what prompts wait on the decoder, the rate at which it lately got through
them, and the share of its time that the TBT target of its running turns leaves to prompts.

What a prompt costs on an engine is taken from its own curve, which follows the prompts it computes, or from
that of its like where its own is old. One that was slow while it started, or while something else had its
machine, would get no prompts for that, and without prompts it never shows that it is faster: so what an
engine has shown counts less the longer ago it was, and what engines of the same hardware show counts instead;
where none of them has computed anything lately, the best that it has shown itself. Nobody is taken to be
slower than it has shown.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, pow
from typing import NamedTuple

from placement.engines import EngineState
from placement.routing.engine_speed import Speed
from placement.routing.receipts import Estimates, PrefillerOption
from placement.scheduling.prefill_curve import PrefillCurve

TRANSFERS_KEPT_S = 20.0  # what the last transfers cost counts; then it fades, half of it in the same time
TRIED_MOST = 4  # each try makes that four times as long; at most an hour and a half
REACHES_ENGINE_S = 0.5  # a turn placed longer ago is in what its engine reports
LEAST_SHARE = 0.05  # of a decoder's time that its prompts are taken to have


class PrefillWaiting(NamedTuple):
    """A turn that a prefiller is to compute, and what it would be on its decoder."""

    decoder: str
    tokens: int  # that the decoder would have to compute


@dataclass(slots=True)
class DecoderPrompts:
    """Prompts on an engine that decodes: what it reported, and what was placed there since."""

    curve: PrefillCurve | None  # None: nothing is known of it but its rate
    waiting_tokens: int = 0
    tokens_per_s: float = 0.0  # lately; 0: it has computed none yet
    share: float = 1.0
    placed: dict[str, tuple[int, float]] = field(default_factory=dict)  # tokens and when

    def first_token_s(self, tokens: int) -> float:
        """Those that wait at the rate of late, then these in the time that running turns leave; infinite
        where nothing is known of how fast it is."""
        return self.alone_s(tokens) + self.wait_s(tokens)

    def wait_s(self, tokens: int) -> float:
        """For the prompts before one of so many tokens; 0 where there are none, at any rate."""
        ahead = self.waiting_tokens + sum(tokens for tokens, _ in self.placed.values())
        if not ahead:
            return 0.0
        rate = self.tokens_per_s or tokens / self.alone_s(tokens)
        return ahead / rate if rate else inf

    def alone_s(self, tokens: int) -> float:
        if self.curve is not None:
            return self.curve.seconds(tokens) / max(self.share, LEAST_SHARE)
        return tokens / self.tokens_per_s if self.tokens_per_s else inf


class Elastic:
    def __init__(self, forget: float = 0.1) -> None:
        """`forget`: share of what is known of transfers that each new one replaces."""
        self._queues: dict[str, DecoderPrompts] = {}
        self._local: dict[str, str] = {}  # conversation -> engine, placed and not reported yet
        self._remote: dict[str, PrefillWaiting] = {}
        self._forget = forget
        self._transfer_s_per_token: float | None = None
        self._transferred_at = self._now = 0.0
        self._tried = 0  # again, after a while without any, and found to cost what was thought

    def add(self, engine: str, curve: PrefillCurve | None) -> None:
        self._queues[engine] = DecoderPrompts(curve)

    def remove(self, engine: str) -> None:
        self._queues.pop(engine, None)
        self._local = {key: name for key, name in self._local.items() if name != engine}
        self._remote = {key: turn for key, turn in self._remote.items() if turn.decoder != engine}

    def observe(self, state: EngineState, now: float, speed: Speed) -> None:
        self._now = now
        queue = self._queues[state.engine]
        if speed.curve is not None and speed.shown:
            queue.curve = speed.curve
        queue.waiting_tokens = state.waiting_prompt_tokens
        queue.tokens_per_s, queue.share = speed.rate, state.prompt_share
        for key, (_, at) in tuple(queue.placed.items()):
            if key in state.confirmed or at < now - REACHES_ENGINE_S:
                self.done(key)

    def transferred(self, tokens: int, seconds: float) -> None:
        """From the end of a prefill to the decoder's start: what of the transfer was not hidden."""
        seen, known = seconds / max(1, tokens), self._transfer_s_per_token
        share = max(self._forget, 1 - self._kept())
        self._transfer_s_per_token = seen if known is None else known + share * (seen - known)
        if known is not None and self._now - self._transferred_at >= self._kept_s():
            self._tried = min(self._tried + 1, TRIED_MOST) if seen >= known else 0
        self._transferred_at = self._now

    def _kept(self) -> float:
        """Of what transfers cost. A slow one was a decoder in the middle of something more often than it was
        the transfer, and must not keep others from showing what they cost: they are tried again, ever more
        rarely."""
        return pow(0.5, max(0.0, (self._now - self._transferred_at) / self._kept_s() - 1))

    def _kept_s(self) -> float:
        return TRANSFERS_KEPT_S * pow(4.0, self._tried)

    def estimates(self, decoder: str, tokens: int, remote: PrefillerOption | None) -> Estimates:
        """`tokens`: what the decoder would compute, and what a prefiller would have to send it."""
        remote_s = None
        if remote is not None:
            remote_s = self.remote_s(remote.engine, remote.wait_s + remote.prefill_s, tokens)
        return Estimates(self._queues[decoder].first_token_s(tokens), remote_s)

    def remote_s(self, prefiller: str, left_s: float, tokens: int) -> float:
        """By a prefiller with so many seconds of prompts until its end, which may hold conversations too."""
        return left_s / max(self._queues[prefiller].share, LEAST_SHARE) + self.transfer_s(tokens)

    def alone_s(self, decoder: str, tokens: int) -> float:
        """Of a prompt that waits for none."""
        return self._queues[decoder].alone_s(tokens)

    def local_wait_s(self, decoder: str, tokens: int) -> float:
        return self._queues[decoder].wait_s(tokens)

    def lent(self, decoders: Iterable[str]) -> float:
        """Their time that running turns leave to prompts, in engines."""
        return sum(self._queues[name].share for name in decoders)

    def transfer_s(self, tokens: int) -> float:
        return tokens * self._kept() * (self._transfer_s_per_token or 0.0)

    def goes_local(self, key: str, decoder: str, tokens: int, now: float) -> None:
        self.done(key)
        self._queues[decoder].placed[key] = tokens, now
        self._local[key] = decoder

    def goes_remote(self, key: str, decoder: str, tokens: int, now: float) -> None:
        self.done(key)
        self._remote[key] = PrefillWaiting(decoder, tokens)

    def begun(self, key: str) -> None:
        """Its prefiller computes it already: it stays there."""
        self._remote.pop(key, None)

    def done(self, key: str) -> None:
        """Its prompt is computed or never will be, or the engine counts it itself now."""
        self._remote.pop(key, None)
        if (engine := self._local.pop(key, None)) is not None:
            del self._queues[engine].placed[key]

    def waiting_for_prefillers(self, decoder: str) -> tuple[tuple[str, int], ...]:
        """Bound to this decoder, longest first in the queue."""
        return tuple((key, turn.tokens) for key, turn in self._remote.items() if turn.decoder == decoder)
