"""Iterations that lesser SLO classes sit out, so that a better one's tokens come at the pace of alone.

A batch of both kinds takes longer than one of the better class, however few of the lesser join it. So they
join seldom and together: when one of them would miss its own TBT target otherwise, or when their prompts
are due to advance. Only what an operator says counts (`RequestView.class_s`), never a request's priority,
and only a class whose TBT target is shorter than theirs: whoever sets none has the capacity instead.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from placement.classes import ClassOrder
from placement.iteration import memory
from placement.iteration.interface import RequestView
from placement.iteration.latency import LatencyModel, Margin
from placement.iteration.online import NOBODY, OnlineShare, SatOut, in_turn, share_out, with_a_token
from placement.iteration.prompts import LESSER_SHARE, PromptSharing


@dataclass(frozen=True, slots=True)
class TwoKinds:
    """Requests of an iteration, those of the best class apart from all others."""

    rows: Sequence[RequestView]  # of the best class, that decode
    prompts: Sequence[RequestView]
    lesser_rows: Sequence[RequestView]
    lesser_prompts: Sequence[RequestView]

    @classmethod
    def of(cls, requests: Sequence[RequestView]) -> "TwoKinds | None":
        """None: nobody is to sit out for anybody."""
        present = [request for request in requests if request.decoding or not request.refused]
        best_s = max((request.class_s for request in present), default=0.0)
        better = [request for request in present if request.class_s == best_s]
        lesser = [request for request in requests if request.class_s < best_s]
        if not lesser or min(r.slo.tbt_s for r in lesser) <= min(r.slo.tbt_s for r in better):
            return None
        return cls(
            [request for request in better if request.decoding],
            [request for request in better if not request.decoding],
            [request for request in lesser if request.decoding],
            [request for request in lesser if not request.decoding],
        )

    def lesser_goes_first(
        self, now: float, model: LatencyModel, sharing: PromptSharing, classes: ClassOrder
    ) -> bool:
        """Before a prompt of the best class: left out for long enough, or worth more by its priority."""
        if not (self.prompts and self.lesser_prompts):
            return False
        first = in_turn((*self.prompts, *self.lesser_prompts), now, model, sharing, classes)[0]
        return first.class_s < self.prompts[0].class_s

    @property
    def lesser_tbt_s(self) -> float:
        return min(request.slo.tbt_s for request in (*self.lesser_rows, *self.lesser_prompts))


class SittingOut:
    """Of one engine. It remembers who sits out, and when prompts of lesser classes last advanced."""

    def __init__(self, margin: float) -> None:
        self._margin = Margin(margin, beyond=0.05)
        self._ends = -math.inf  # the iteration planned last, by the model
        self._advanced = -math.inf  # when prompts of lesser classes last had a part of an iteration
        self._since: dict[str, float | None] = {}  # who sits out, and its token before that

    def see(self, predicted_s: float, seconds: float) -> None:
        """An iteration that ended."""
        self._margin.see(predicted_s, seconds)

    def share_out(
        self,
        requests: Iterable[RequestView],
        now: float,
        max_tokens: int,
        model: LatencyModel,
        sharing: PromptSharing,
        classes: ClassOrder,
    ) -> OnlineShare:
        """As `online.share_out`, of those that do not sit out."""
        requests = tuple(requests)
        # With asynchronous scheduling it begins when the one that is under way has ended.
        overlaps = any(request.running and request.computed >= request.tokens for request in requests)
        starts = max(now, self._ends) if overlaps else now
        kinds = TwoKinds.of(requests)
        sits = NOBODY
        if kinds is not None and not kinds.lesser_goes_first(now, model, sharing, classes):
            sits = self._sit_out(kinds, starts, max_tokens, model, sharing)
        if not sits.alone:
            sharing = self._within_their_targets(requests, starts, sharing)
        share = share_out(requests, now, max_tokens, model, sharing, classes, sits)
        self._remember(requests, kinds, sits, share, starts, model)
        return share

    def _sit_out(
        self,
        kinds: TwoKinds,
        starts: float,
        max_tokens: int,
        model: LatencyModel,
        sharing: PromptSharing,
    ) -> SatOut:
        waited_s = starts - self._advanced
        until_s = self._until_they_must_join(kinds, starts, max_tokens, model)
        alone_s = seconds_alone(kinds, max_tokens, model, sharing)
        wait = not kinds.prompts and any(not request.refused for request in kinds.lesser_prompts)
        due = wait and waited_s + alone_s >= kinds.lesser_tbt_s
        prompts = {request.key for request in kinds.lesser_prompts}
        if alone_s <= until_s and not due:
            rows = {request.key for request in kinds.lesser_rows}
            return SatOut(frozenset(rows | prompts), alone=True, until_s=until_s)
        # Rows join. Prompts do with them, if by the next time they would have waited for too long.
        joins = not kinds.prompts and waited_s >= kinds.lesser_tbt_s / 2
        owed_s = LESSER_SHARE * min(waited_s, kinds.lesser_tbt_s)
        return SatOut(frozenset() if joins else frozenset(prompts), owed_s=owed_s)

    def _until_they_must_join(
        self, kinds: TwoKinds, starts: float, max_tokens: int, model: LatencyModel
    ) -> float:
        """How long the iteration may take, if those that decode have theirs in the iterations after it: as
        many in each as `with_a_token` lets in, whoever is due first before others."""
        if not kinds.lesser_rows:
            return math.inf
        joined, _ = with_a_token(
            (*kinds.rows, *kinds.lesser_rows), (*kinds.prompts, *kinds.lesser_prompts), max_tokens, model
        )
        at_once = max(len(joined) - len(kinds.rows), 1)
        together_s = model.seconds(memory.online_work(joined, max_tokens)) + LESSER_SHARE * kinds.lesser_tbt_s
        left = sorted(self._left_s(request, starts) for request in kinds.lesser_rows)
        return min(one - (number // at_once + 1) * together_s for number, one in enumerate(left))

    def _left_s(self, request: RequestView, starts: float) -> float:
        """Until its next token is due, by the model. One under way comes when the iteration starts."""
        under_way = request.computed >= request.tokens
        left_s = request.slo.tbt_s if under_way else request.deadline() - starts
        return left_s / (1 + self._margin.share)

    def _within_their_targets(
        self, requests: Sequence[RequestView], starts: float, sharing: PromptSharing
    ) -> PromptSharing:
        """Prompts are cut so that those that have sat out still meet their target, where that is possible."""
        left = [self._left_s(request, starts) for request in requests if self._has_sat_out(request)]
        left_s = min((one for one in left if one > 0), default=math.inf)
        if left_s >= sharing.tbt_s:
            return sharing
        return replace(sharing, tbt_s=left_s, least=LESSER_SHARE)

    def _has_sat_out(self, request: RequestView) -> bool:
        return request.key in self._since and self._since[request.key] == request.last_token

    def _remember(
        self,
        requests: Sequence[RequestView],
        kinds: TwoKinds | None,
        sits: SatOut,
        share: OnlineShare,
        starts: float,
        model: LatencyModel,
    ) -> None:
        self._ends = starts + model.seconds(share.work)
        self._since = {
            request.key: request.last_token
            for request in requests
            if request.decoding
            and share.caps.get(request.key) == 0
            and (request.key in sits.keys or self._has_sat_out(request))
        }
        if kinds is None or not any(request.key in sits.keys for request in kinds.lesser_prompts):
            self._advanced = starts


def seconds_alone(kinds: TwoKinds, max_tokens: int, model: LatencyModel, sharing: PromptSharing) -> float:
    """What an iteration of the best class takes by itself, with what its targets allow of its prompts."""
    decoding_s = model.seconds(memory.online_work(kinds.rows, max_tokens))
    seconds = model.seconds(memory.online_work((*kinds.rows, *kinds.prompts), max_tokens))
    return min(seconds, sharing.iteration_s(decoding_s)) if kinds.rows else seconds
