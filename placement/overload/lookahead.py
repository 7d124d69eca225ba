"""Lookahead batch formation: micro-batches of a pipeline that take equally long, by the latency model.

Stages of a pipeline wait for the longest of its micro-batches. Equal token counts do not take equally long,
because a token attends to all of its context; so prompts are cut where a batch would be the longest. Two
variants. In the simulator (`lookahead`) prompts are also spread: one of an engine is computed by all parts.
(The KunServe paper halves a batch recursively until its parts are equal; filling all parts to one level gives
equal parts for any number of them.) In running engines (`own_level`, `cut_to`) each cuts its own prompts at a
level that it knows from what the others said of their next batches. Live prompts stay with their engine: its
scheduler has their requests and blocks, and another one's would need both for a piece of one iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from placement.scheduling.latency_model import BatchWork, LatencyModel

LEAST_TOKENS = 32  # of a piece: cutting costs reading the context once more
ROUNDS = 8
FRESH_S = 2.0  # how old what is known of another member's batch may be: it may have none any more
MOST_S = 3600.0  # of a batch: more is nonsense


class Forecast(NamedTuple):
    """An engine's next batch, in seconds of its whole model: what another member waits for."""

    base_s: float  # of what decodes
    wanted_s: float  # with the prompts that its own budget lets in

    @staticmethod
    def of(values: Any) -> "Forecast | None":
        """As another member said it; None: it is no forecast."""
        if not isinstance(values, list | tuple) or len(values) != 2:
            return None
        if any(type(one) not in (int, float) for one in values):
            return None
        base_s, wanted_s = map(float, values)
        return Forecast(base_s, wanted_s) if 0 <= base_s <= wanted_s <= MOST_S else None


@dataclass(frozen=True, slots=True)
class PipelineView:
    """What an engine that shares its layers knows of the other members' next batches."""

    model: LatencyModel  # of the whole model: what is said in its seconds means the same to all
    peers: tuple[Forecast, ...]  # that are known, and young


def own_level(own: Forecast, peers: Sequence[Forecast]) -> float:
    """Seconds to which an engine cuts its batch: what members take on average by their own budgets, but no
    less than the longest of what decodes, which all wait for anyway. Prompts keep the share of one member of
    what they wanted, or they would never end beside turns that decode for longer than the average."""
    members = (own, *peers)
    mean = sum(one.wanted_s for one in members) / len(members)
    least = own.base_s + (own.wanted_s - own.base_s) / len(members)
    return max(mean, least, *(one.base_s for one in members))


def cut_to(
    model: LatencyModel, work: BatchWork, prompts: Sequence[tuple[int, int]], level: float
) -> list[int]:
    """Of prompts as (new tokens, context), in their order, the tokens that join `work` below the level. The
    first has some in any case, and behind one that is cut there are none."""
    taken: list[int] = []
    for tokens, context in prompts:
        fits = model.max_tokens(work, context, tokens, level)
        if not taken:
            fits = max(fits, min(LEAST_TOKENS, tokens))
        taken.append(fits)
        if fits < tokens:
            break
        work = work.plus(fits, context)
    return taken + [0] * (len(prompts) - len(taken))


class Piece(NamedTuple):
    prompt: int  # its place in what was given
    new_tokens: int
    context: int


class Formation(NamedTuple):
    pieces: tuple[tuple[Piece, ...], ...]  # of each micro-batch; those of one prompt are in order
    seconds: tuple[float, ...]

    @property
    def longest_s(self) -> float:
        return max(self.seconds, default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the stages' time that is spent waiting for the longest micro-batch."""
        return 1 - sum(self.seconds) / (len(self.seconds) * self.longest_s) if self.longest_s else 0.0


def lookahead(
    model: LatencyModel, decoding: Sequence[BatchWork], prompts: Sequence[tuple[int, int]]
) -> Formation:
    """One micro-batch for each of `decoding`; `prompts` as (new tokens, context), first come first served."""
    bases = [model.seconds(work) for work in decoding]
    level = _level(bases, sum(_adds(model, *prompt) for prompt in prompts))
    for _ in range(ROUNDS):
        formed, left = _fill(model, decoding, prompts, level)
        if not left:
            return formed
        level += left / len(decoding)
    return _fill(model, decoding, prompts, level, all_in=True)[0]


def by_tokens(
    model: LatencyModel, decoding: Sequence[BatchWork], own: Sequence[Sequence[tuple[int, int]]]
) -> Formation:
    """Every engine's own batch, cut by its token budget: what a pipeline does without looking ahead."""
    numbers = iter(range(sum(map(len, own))))
    pieces = tuple(tuple(Piece(next(numbers), *prompt) for prompt in prompts) for prompts in own)
    seconds = tuple(
        model.seconds(work + BatchWork.of(prompts)) if work.requests or prompts else 0.0
        for work, prompts in zip(decoding, own, strict=True)
    )
    return Formation(pieces, seconds)


def _adds(model: LatencyModel, new_tokens: int, context: int) -> float:
    return model.seconds(BatchWork().plus(new_tokens, context)) - model.constant


def _level(bases: Sequence[float], amount: float) -> float:
    """How high so much reaches, poured over the bases."""
    level, below = 0.0, 0.0
    rising = sorted(bases)
    for count, base in enumerate(rising, 1):
        below += base
        level = (below + amount) / count
        if level <= min(rising[count:], default=level):
            break
    return level


def _fill(
    model: LatencyModel,
    decoding: Sequence[BatchWork],
    prompts: Sequence[tuple[int, int]],
    level: float,
    all_in: bool = False,
) -> tuple[Formation, float]:
    """Also the seconds of what found no place below the level; `all_in`: the last part takes it."""
    done = [0] * len(prompts)
    formed: list[tuple[Piece, ...]] = []
    seconds: list[float] = []
    at = 0
    for part, start in enumerate(decoding):
        work, pieces = start, []
        while at < len(prompts):
            new_tokens, context = prompts[at]
            left, before = new_tokens - done[at], context + done[at]
            last = all_in and part == len(decoding) - 1
            fits = left if last else model.max_tokens(work, before, left, level * (1 + 1e-9))
            if fits < min(LEAST_TOKENS, left):
                break
            pieces.append(Piece(at, fits, before))
            work = work.plus(fits, before)
            done[at] += fits
            if fits < left:
                break
            at += 1
        formed.append(tuple(pieces))
        seconds.append(model.seconds(work) if work.requests else 0.0)
    rest = sum(
        _adds(model, new - did, context + did)
        for (new, context), did in zip(prompts, done, strict=True)
        if new > did
    )
    return Formation(tuple(formed), tuple(seconds)), rest
