"""Tokens of online requests in an iteration: those that decode, and prompts before their first token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.iteration import memory
from placement.iteration.interface import RequestView
from placement.iteration.latency import BatchWork, LatencyModel

LEAST_STRETCH = 0.25

Caps = Mapping[str, int]  # tokens of online requests at most, by key; of those not in it: all they want


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """What prompts take that are computed one after the other, beside requests that decode."""

    decoding: BatchWork  # in every iteration
    max_tokens: int
    model: LatencyModel

    def better_wait(
        self,
        behind: Sequence[RequestView],
        tokens: int,
        ending: Sequence[RequestView],
        work: BatchWork,
        now: float,
    ) -> bool:
        """Whether those behind are better left out of the iteration in which others get their first token.

        The rest of a prompt is often small, and filled up with `tokens` of the next one its iteration takes
        as long as any; left alone it costs those behind one iteration's constant and decoding more. So they
        wait where the others would be late else, and if whoever is then the latest of all is less late.
        """
        alone = now + self.model.seconds(work)
        filled = now + self.model.seconds(work.plus(tokens, behind[0].computed))
        due = min(request.deadline() for request in ending)
        if filled <= due:
            return False
        late_alone = max(alone - due, self.lateness(behind, 0, alone))
        return late_alone < max(filled - due, self.lateness(behind, tokens, filled))

    def lateness(self, prompts: Sequence[RequestView], done: int, start: float) -> float:
        """Of the latest, beginning at `start`, the first with `done` tokens more than its view says."""
        at, latest = start, float("-inf")
        for request in prompts:
            left = request.pending - done
            iterations = -(-left // self.max_tokens)
            prompt = BatchWork().plus(left, request.computed + done)
            at += self.model.seconds(prompt) - self.model.seconds(BatchWork())
            at += iterations * self.model.seconds(self.decoding)
            latest, done = max(latest, at - request.deadline()), 0
        return latest


def due(request: RequestView, margin: float) -> float:
    """When an iteration that has its next token should end."""
    return request.deadline() - margin * request.slo.tbt_s


def share_out(
    online: tuple[RequestView, ...], now: float, max_tokens: int, model: LatencyModel, margin: float
) -> tuple[BatchWork, Caps]:
    """What online requests compute in this iteration.

    Those that decode have their token, and prompts as much of the iteration as the soonest deadline leaves:
    also right after an abort, which has cost that deadline time already.
    """
    decoding = [request for request in online if request.decoding]
    prompts = [request for request in online if not request.decoding]
    beside = work = memory.online_work(decoding, max_tokens)
    target = math.inf
    if decoding:
        soonest = min(due(request, margin) for request in decoding) - now
        target = max(soonest, 2 * model.seconds(beside))  # half is the prompts', or they would never end
    caps: dict[str, int] = {}
    ending: list[RequestView] = []
    for index, request in enumerate(prompts):
        want = min(request.pending, max_tokens - work.new_tokens)
        tokens = want if target == math.inf else model.max_tokens(work, request.computed, want, target)
        if tokens and ending:
            queue = PromptQueue(beside, max_tokens, model)
            if queue.better_wait(prompts[index:], tokens, ending, work, now):
                caps.update((other.key, 0) for other in prompts[index:])
                break
        if tokens < want:  # by time; the engine knows better how far its budget goes with prefix hits
            caps[request.key] = tokens
        if tokens:
            work = work.plus(tokens, request.computed)
            if tokens == request.pending:
                ending.append(request)
    return work, caps


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
    targets = [
        due(request, margin) - now if request.decoding
        else min(request.slo.tbt_s, request.arrival + ttft_share * request.slo.ttft_s - now) * (1 - margin)
        for request in online
    ]  # fmt: skip
    decoding = [request for request in online if request.decoding]
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
