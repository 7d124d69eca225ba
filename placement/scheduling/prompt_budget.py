"""Tokens of online requests in an iteration: those that decode, and prompts before their first token."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from placement.priorities import ClassOrder
from placement.scheduling import preemption
from placement.scheduling.interface import RequestView
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_order import LESSER_SHARE, PromptSharing

LEAST_STRETCH = 0.25

Caps = Mapping[str, int]  # tokens of online requests at most, by key; of those not in it: all they want


@dataclass(frozen=True, slots=True)
class OnlineShare:
    """What requests that go first compute in an iteration."""

    work: BatchWork
    caps: Caps
    prompts: tuple[RequestView, ...]  # in the order in which they are computed
    seconds: float  # what the iteration may take by prompts; infinity: as long as they like
    held_back: bool = False  # a prompt waits for the end of those before it: nothing else has its place
    yields: bool = (
        False  # its prompts are of lesser classes than were here of late, and nothing better decodes
    )


@dataclass(frozen=True, slots=True)
class LesserShare:
    """What lesser classes have of an iteration beside the best one that decodes, whatever its target says: a
    tenth of the time, all of it in one iteration of ten, or of as many as their own targets allow. A batch of
    both kinds takes longer than it has tokens, so that a little in each would cost a better class more.
    """

    best_s: float  # what the best class is worth
    share_s: float  # of the iteration; 0: they sit it out
    until_s: float  # how long it may take with those that decode
    classes: ClassOrder
    now: float

    @classmethod
    def of(
        cls,
        decoding: Sequence[RequestView],
        waiting: Sequence[RequestView],
        now: float,
        max_tokens: int,
        model: LatencyModel,
        classes: ClassOrder,
    ) -> "LesserShare":
        best_s, best = best_class(decoding)
        alone_s = model.seconds(preemption.online_work(best, max_tokens))
        others = waiting if len(best) == len(decoding) else (*decoding, *waiting)
        targets = [request.slo.tbt_s for request in others if request.worth_s < best_s]
        every_s = min(alone_s / LESSER_SHARE, *targets, math.inf)
        share_s = LESSER_SHARE * every_s if classes.left_out_s(now) >= every_s else 0.0
        return cls(best_s, share_s, alone_s + share_s if share_s else 0.0, classes, now)

    def has(self, request: RequestView) -> bool:
        """Whether it is of a lesser class than what decodes."""
        return request.worth_s < self.best_s

    def sits_out(self, prompt: RequestView) -> bool:
        return self.has(prompt) and not self.share_s

    def queue_weight(self, request: RequestView) -> float:
        """What it is worth where it waits: of a lesser class no more than that, for anybody may send a
        priority."""
        return min(request.queue_weight, request.worth_s) if self.has(request) else request.queue_weight

    def prompt_until_s(self, decoding_s: float) -> float:
        """The iteration with a prompt, whose share comes on top of that of those that decode."""
        return decoding_s + self.share_s if self.share_s else 0.0

    def served(self) -> None:
        if self.share_s:
            self.classes.shared(self.now)


def token_due(request: RequestView, margin: float) -> float:
    """When an iteration that has its next token should end."""
    return request.deadline() - margin * request.slo.tbt_s


def until_a_token_is_due(online: Iterable[RequestView], now: float, margin: float) -> float:
    """Seconds: also right after an abort, which has cost that deadline time already."""
    return min((token_due(r, margin) - now for r in online if r.decoding), default=math.inf)


def share_out(
    requests: Iterable[RequestView],
    now: float,
    max_tokens: int,
    model: LatencyModel,
    sharing: PromptSharing,
    classes: ClassOrder,
) -> OnlineShare:
    """Those that decode have their token, and prompts, in the policy's order, what time that leaves."""
    decode: list[RequestView] = []
    waiting: list[RequestView] = []
    for request in requests:
        (decode if request.decoding else waiting).append(request)
    lesser = LesserShare.of(decode, waiting, now, max_tokens, model, classes)
    prompts = in_turn(waiting, now, model, sharing, classes, lesser)
    decoding, left_out = with_a_token(decode, prompts, max_tokens, model, lesser)
    alone = work = preemption.online_work(decoding, max_tokens)
    decoding_s = model.seconds(alone)
    seconds = sharing.iteration_s(decoding_s) if decoding else math.inf
    here_s = max((request.worth_s for request in waiting), default=-math.inf)
    here_s = max(here_s, lesser.best_s)
    best_of_late_s = classes.best_of_late(here_s, now)
    left = max_tokens - work.new_tokens
    budget = left if sharing.fills else sharing.chunk(model, left)
    caps = {request.key: 0 for request in left_out}
    most_s = max((lesser.queue_weight(request) for request in prompts), default=0.0)
    best_s, held_back, owed = -math.inf, False, False  # the best prompt with tokens; one has them by right
    for index, request in enumerate(prompts):
        tokens = min(request.pending, budget)
        if request.worth_s < best_s:  # or the better class's first token would wait for it
            caps[request.key] = 0
            held_back |= not request.refused
            continue
        if decoding:
            lesser_s = max(sharing.tbt_s, lesser.prompt_until_s(decoding_s))
            until_s = lesser_s if lesser.has(request) else sharing.iteration_s(decoding_s)
        else:
            until_s = math.inf
        if request.worth_s < best_of_late_s:
            least_s = 2 * model.seconds(work.plus(1, request.computed))  # half is the prompt's own
            until_s = min(until_s, max(sharing.arriving_s, least_s))
        if until_s < math.inf:
            tokens = model.max_tokens(work, request.computed, tokens, until_s)
        if index == 0 and (lesser.share_s or not lesser.has(request)):
            tokens = max(tokens, min(1, budget))  # or it would never end
        part = tokens < request.pending
        waits = part and index > 0 and not sharing.fills and due(request, model, sharing) > now
        if part:
            caps.update((other.key, 0) for other in prompts[index:])
        if waits:
            held_back = True
            break
        if tokens:
            work = work.plus(tokens, request.computed)
            budget -= tokens
            if not request.refused:
                best_s = max(best_s, request.worth_s)
                if request.worth_s < best_of_late_s:
                    level = classes.level(lesser.queue_weight(request), request.arrival, most_s, now)
                    owed |= (lesser.has(request) and lesser.share_s > 0) or level == math.inf
                classes.served(lesser.queue_weight(request), now)
                if lesser.has(request):
                    lesser.served()
        if part:
            caps[request.key] = tokens
            break
    if held_back:  # the engine looks no further than at one without tokens
        prompts = tuple(sorted(prompts, key=lambda request: caps.get(request.key) == 0))
    yields = -math.inf < best_s < best_of_late_s and lesser.best_s < best_of_late_s and not owed
    return OnlineShare(work, caps, prompts, seconds, held_back, yields)


def with_a_token(
    decoding: Sequence[RequestView],
    prompts: Sequence[RequestView],
    max_tokens: int,
    model: LatencyModel,
    share: LesserShare,
) -> tuple[Sequence[RequestView], Sequence[RequestView]]:
    """Those that have their token in an iteration, and those that are left out of it.

    Of the best class that has something to compute all have it. Lesser ones, who lacks a token for longest
    first, have what its TBT target leaves, and their share; beside a prompt of it a tenth of what an
    iteration may take, and one token at least.
    """
    of_prompts = max((request.worth_s for request in prompts if not request.refused), default=-math.inf)
    of_decoding, first = best_class(decoding)
    best_s = max(of_prompts, of_decoding)
    if best_s > of_decoding:
        first = []
    if len(first) == len(decoding):
        return decoding, ()
    work, joined = preemption.online_work(first, max_tokens), 0
    target_s = min((request.slo.tbt_s for request in first), default=math.inf)
    if of_prompts == best_s:
        shortest_s = min(request.slo.tbt_s for request in decoding)
        until_s, least = min(target_s, model.seconds(work) + LESSER_SHARE * shortest_s), 1
    else:
        until_s, least = max(target_s, share.until_s), int(share.share_s > 0)
    lesser = sorted(
        (request for request in decoding if request.worth_s < best_s),
        key=lambda r: (r.arrival if r.last_token is None else r.last_token, r.key),
    )
    for request in lesser:
        work = work.plus(1, request.computed)
        if joined >= least and model.seconds(work) > until_s:
            break
        joined += 1
    if joined:
        share.served()
    return (*first, *lesser[:joined]), lesser[joined:]


def best_class(requests: Sequence[RequestView]) -> tuple[float, list[RequestView]]:
    """What the best class among them is worth, and who is of it."""
    worths = [request.worth_s for request in requests]
    best_s = max(worths, default=-math.inf)
    return best_s, [request for request, worth_s in zip(requests, worths, strict=True) if worth_s == best_s]


def in_turn(
    prompts: Sequence[RequestView],
    now: float,
    model: LatencyModel,
    sharing: PromptSharing,
    classes: ClassOrder,
    lesser: LesserShare | None = None,
) -> tuple[RequestView, ...]:
    """Better classes first, then the policy's order; but what the engine had no place for makes nobody wait
    who has one, and neither does what sits this iteration out.

    Once that is overdue, nobody of its class starts before it either who was due later: the place is to
    become its own.
    """
    dues = {request.key: due(request, model, sharing) for request in prompts}
    overdue = min((dues[r.key] for r in prompts if r.refused and dues[r.key] <= now), default=math.inf)
    queue_weight = {r.key: lesser.queue_weight(r) if lesser else r.queue_weight for r in prompts}
    best_s = max(queue_weight.values(), default=0.0)

    def turn(request: RequestView) -> tuple[bool, bool, float, float, str]:
        at = dues[request.key]
        behind = request.refused or (not request.running and at > overdue)
        sits_out = lesser is not None and lesser.sits_out(request)
        level = classes.level(queue_weight[request.key], request.arrival, best_s, now)
        return behind, sits_out, -level, at, request.key

    return tuple(sorted(prompts, key=turn))


def due(request: RequestView, model: LatencyModel, sharing: PromptSharing) -> float:
    return sharing.due(model, request.arrival - request.queue_weight, request.pending, request.computed)


def tightest_target(
    online: tuple[RequestView, ...],
    now: float,
    model: LatencyModel,
    margin: float,
    ttft_share: float,
    decoding_per_constant: float,
) -> float | None:
    """How long an iteration may become by offline work: until a token is due, or a prompt has used up
    `ttft_share` of its TTFT, which is what others may cost it.

    A prompt's last chunk is small, and would otherwise be filled up with offline work while others wait
    behind it.
    """
    if not online:
        return None
    decoding: list[RequestView] = []
    targets: list[float] = []
    for request in online:
        if request.decoding:
            decoding.append(request)
            targets.append(token_due(request, margin) - now)
        else:
            of_its_ttft_s = request.arrival + ttft_share * request.slo.ttft_s - now
            targets.append(min(request.slo.tbt_s, of_its_ttft_s) * (1 - margin))
    if decoding:
        targets.append(worth_stretching(decoding, model, decoding_per_constant))
    return max(min(targets), 0.0)


def worth_stretching(
    decoding: Sequence[RequestView], model: LatencyModel, decoding_per_constant: float
) -> float:
    """How long requests that decode are best kept in an iteration, where their target would allow more.

    Long iterations pay the constant less often; but the longer a token takes, the more online requests decode
    at once, and the prompts that come meanwhile are computed beside all of them. So when decoding costs more
    than some times the constant, offline work has that much less of what the target leaves. It keeps a
    quarter, or it would starve beside long conversations, or by a profile in which the constant is nothing.
    """
    work = BatchWork.of((1, request.computed) for request in decoding)
    alone, constant = model.seconds(work), model.seconds(BatchWork())
    cost, worth = alone - constant, decoding_per_constant * constant
    left = max(min(request.slo.tbt_s for request in decoding) - alone, 0.0)
    return alone + left * (max(worth / cost, LEAST_STRETCH) if cost > worth else 1.0)
