"""Token budget of an iteration: the tokens of online requests, and the time that offline work may add."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from placement.priorities import ClassOrder
from placement.scheduling import memory_preemption
from placement.scheduling.interface import RequestView
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_order import PromptSharing

LEAST_STRETCH = 0.25  # least share of the time left within the TBT target that offline work may use

TokenCaps = Mapping[str, int]  # request -> most tokens that it may get; others have no cap


@dataclass(frozen=True, slots=True)
class OnlineShare:
    """Share of an iteration that online requests get."""

    work: BatchWork
    caps: TokenCaps
    prompts: tuple[RequestView, ...]  # in the order in which they are computed
    seconds: float  # how long prompts may make the iteration; infinity: no limit
    held_back: bool = False  # whether a prompt was left out for the prompts before it; its time stays unused


def token_due(request: RequestView, margin: float) -> float:
    """Return when an iteration with the request's next token should end: its deadline less the margin."""
    return request.deadline() - margin * request.slo.tbt_s


def until_a_token_is_due(online: Iterable[RequestView], now: float, margin: float) -> float:
    """Return the seconds until the first token of the decoding online requests is due, infinite without any.

    The seconds count from `now`, so that the time that an aborted iteration has used up is included.
    """
    return min((token_due(r, margin) - now for r in online if r.decoding), default=math.inf)


def share_online(
    requests: Iterable[RequestView],
    now: float,
    max_tokens: int,
    model: LatencyModel,
    sharing: PromptSharing,
    classes: ClassOrder,
) -> OnlineShare:
    """Plan one token for each decoding request, then give prompts, in order, the time that is left."""
    decoding: list[RequestView] = []
    waiting: list[RequestView] = []
    for request in requests:
        (decoding if request.decoding else waiting).append(request)
    prompts = prompts_in_order(waiting, now, model, sharing, classes)
    work = memory_preemption.online_work(decoding, max_tokens)
    limit_s = sharing.iteration_s(model.seconds(work)) if decoding else math.inf
    left = max_tokens - work.new_tokens
    budget = left if sharing.fills else sharing.chunk(model, left)
    caps: dict[str, int] = {}
    held_back = False
    for index, request in enumerate(prompts):
        tokens = min(request.pending, budget)
        if decoding:
            tokens = model.max_tokens(work, request.computed, tokens, limit_s)
        if index == 0:
            tokens = max(tokens, min(1, budget))  # a token at least, or the prompt might never end
        is_part = tokens < request.pending
        if is_part:
            caps.update((other.key, 0) for other in prompts[index:])
        if is_part and index > 0 and not sharing.fills and due(request, model, sharing) > now:
            held_back = True
            break
        if tokens:
            work = work.plus(tokens, request.computed)
            budget -= tokens
            if not request.refused:
                classes.served(request.queue_weight, now)
        if is_part:
            caps[request.key] = tokens
            break
    return OnlineShare(work, caps, prompts, limit_s, held_back)


def prompts_in_order(
    prompts: Sequence[RequestView],
    now: float,
    model: LatencyModel,
    sharing: PromptSharing,
    classes: ClassOrder,
) -> tuple[RequestView, ...]:
    """Return the prompts in the order in which they are computed: by class, then by due time.

    A prompt for which the engine lacked memory goes behind all prompts that have not been refused. Once it is
    overdue, prompts that are due later and have not started go behind as well, so that the next free memory
    goes to the overdue prompt.
    """
    dues = {request.key: due(request, model, sharing) for request in prompts}
    overdue = min((dues[r.key] for r in prompts if r.refused and dues[r.key] <= now), default=math.inf)
    highest = max((request.queue_weight for request in prompts), default=0.0)

    def rank(request: RequestView) -> tuple[bool, float, float, str]:
        at = dues[request.key]
        behind = request.refused or (not request.running and at > overdue)
        level = classes.level(request.queue_weight, request.arrival, highest, now)
        return behind, -level, at, request.key

    return tuple(sorted(prompts, key=rank))


def due(request: RequestView, model: LatencyModel, sharing: PromptSharing) -> float:
    """Return when a prompt should end, earlier by its queue weight. This time orders the prompts."""
    return sharing.due(model, request.arrival - request.queue_weight, request.pending, request.computed)


def tightest_target(
    online: tuple[RequestView, ...],
    now: float,
    model: LatencyModel,
    margin: float,
    ttft_share: float,
    decoding_per_constant: float,
) -> float | None:
    """Return how long an iteration with offline work may take, or None if there is no online request.

    The iteration has to end before a token is due, and before a prompt has used up `ttft_share` of its TTFT
    target. Without the second bound, offline work would fill up the iteration of a prompt's small last chunk
    while other prompts wait.
    """
    if not online:
        return None
    decoding: list[tuple[int, int]] = []
    targets: list[float] = []
    tbt_s = math.inf
    for request in online:
        if request.decoding:
            decoding.append((1, request.computed))
            tbt_s = min(tbt_s, request.slo.tbt_s)
            targets.append(token_due(request, margin) - now)
        else:
            ttft_left_s = request.arrival + ttft_share * request.slo.ttft_s - now
            targets.append(min(request.slo.tbt_s, ttft_left_s) * (1 - margin))
    if decoding:
        targets.append(stretched_iteration_s(BatchWork.of(decoding), tbt_s, model, decoding_per_constant))
    return max(min(targets), 0.0)


def stretched_iteration_s(
    decoding: BatchWork, tbt_s: float, model: LatencyModel, decoding_per_constant: float
) -> float:
    """Return the best length of an iteration for decoding requests, within their TBT target `tbt_s`.

    Long iterations pay the model's constant less often. But the longer a token takes, the more online
    requests decode at once, and the prompts that arrive meanwhile are computed beside all of them. So when
    decoding costs more than `decoding_per_constant` times the constant, offline work gets proportionally less
    of the time that the target leaves. It keeps at least a quarter. Otherwise it would starve beside long
    conversations, or with a profile whose constant is zero.
    """
    alone, constant = model.seconds(decoding), model.seconds(BatchWork())
    cost, worth = alone - constant, decoding_per_constant * constant
    left = max(tbt_s - alone, 0.0)
    return alone + left * (max(worth / cost, LEAST_STRETCH) if cost > worth else 1.0)
