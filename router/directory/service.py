"""The directory's gRPC surface: wire messages in, calls on the table, wire messages out."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import orjson

from router.directory import directory_pb2 as pb
from router.directory import directory_pb2_grpc as rpc
from router.directory import messages
from router.directory.journal import JournalError
from router.directory.placing import Placing

if TYPE_CHECKING:
    from router.directory.server import DirectoryServer

_MAX_PAGE = 1000
_MAX_TAILS = 8


class DirectoryService(rpc.DirectoryServicer):
    def __init__(self, server: "DirectoryServer") -> None:
        self._server = server
        self._table = server.table

    async def Place(self, request: pb.PlacesRequest, context: Any) -> AsyncIterator[pb.PlacesReply]:
        try:
            with Placing(self._server, map(messages.ask, request.asks)) as placing:
                async for answers in placing.answers():
                    replies = [messages.place_reply(index, outcome) for index, outcome in answers]
                    yield pb.PlacesReply(replies=replies)
        except JournalError as wrong:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(wrong))

    async def Identify(self, request: pb.IdentifyRequest, context: Any) -> pb.IdentifyReply:
        reply = pb.IdentifyReply(index=-1)
        for index, digest in enumerate(request.digests or request.links):
            if request.links and (lengths := self._table.nodes.tails(digest)):
                reply.tails.append(pb.Tails(index=index, lengths=lengths))
            holders = self._table.nodes.holders(digest)
            if holders:
                reply.index = index
                reply.holders.extend(
                    pb.Holder(
                        conversation=holder.conversation,
                        tip=holder.tip,
                        running=self._server.running(holder.conversation),
                    )
                    for holder in holders
                )
                break
            if len(reply.tails) >= _MAX_TAILS:
                break
        return reply

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportReply:
        now = self._server.clock()
        unknown: set[str] = set()
        for activity in request.activities:
            if not self._take(activity, request.gateway, now):
                unknown.add(activity.key)
        self._server.changed()
        return pb.ReportReply(unknown=sorted(unknown))

    async def End(self, request: pb.EndRequest, context: Any) -> pb.EndReply:
        known = self._table.end(request.key, request.cause, self._server.clock())
        self._server.changed()
        if known:
            try:
                await self._server.durable()
            except JournalError as wrong:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(wrong))
        return pb.EndReply(known=known)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.News]:
        watcher = self._server.watchers.join(request.gateway, request.metrics)
        self._server.gateway_came(request.gateway)
        try:
            while True:
                await watcher.wait()
                if watcher.overrun:
                    return
                ended, foreign, engines = watcher.take()
                yield pb.News(
                    engines=self._server.engines() if engines else None,
                    ended=[pb.Ended(key=key, cause=cause) for key, cause in ended],
                    foreign=foreign,
                )
        finally:
            if self._server.watchers.leave(request.gateway, watcher):
                self._server.gateway_left(request.gateway)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        found = self._table.describe(request.key)
        return pb.DescribeReply(json=orjson.dumps(found) if found is not None else b"")

    async def List(self, request: pb.ListRequest, context: Any) -> pb.ListReply:
        limit = min(max(request.limit, 1), _MAX_PAGE)
        return pb.ListReply(json=orjson.dumps(self._table.page(request.prefix, request.after or None, limit)))

    async def Lanes(self, request: pb.LanesRequest, context: Any) -> pb.LanesReply:
        now = self._server.clock()
        lanes = list(self._server.lanes.newest_first(now - request.seconds))
        slo = {"met": self._server.met, "missed": self._server.missed}
        return pb.LanesReply(json=orjson.dumps({"now": now, "lanes": lanes, "slo": slo}))

    async def Capacity(self, request: pb.CapacityRequest, context: Any) -> pb.CapacityReply:
        if self._table.fleet.awaits_some:  # nobody should add or end engines by what a part of them holds
            await context.abort(grpc.StatusCode.UNAVAILABLE, "engines have not reported since the restart")
        return messages.capacity_reply(*self._server.capacity.now())

    async def Engines(self, request: pb.EnginesRequest, context: Any) -> pb.EnginesReply:
        return pb.EnginesReply(
            engines=self._server.engines(),
            live_conversations=len(self._table.conversations),
            waiting=self._table.waiting,
            metrics=self._server.metrics_page,
            gateways=self._server.watchers.pages,
        )

    def _take(self, activity: pb.Activity, gateway: str, now: float) -> bool:
        what = activity.WhichOneof("what")
        lanes, key = self._server.lanes, activity.key
        if what == "first_token":
            lanes.first_token(key, now)
            return True
        if what == "turn_began":
            known = self._table.turn_began(
                key, gateway, messages.end_of(activity.turn_began), now, activity.turn
            )
            if known and (binding := self._table.binding(key)):
                lanes.turn_started(key, binding.engine, transferred=False, now=now)
            return known
        if what == "prefill_done":
            self._table.prefill_done(activity.key, now)
            done = activity.prefill_done
            if done.HasField("lost"):
                self._table.fleet.suspect(done.lost.engine, done.lost.epoch)
            if self._table.waiting:
                self._server.serve_soon()
            return True
        ended = activity.turn_ended
        self._server.met.update(ended.met)
        self._server.missed.update(ended.missed)
        lanes.turn_ended(key, ended.tool_call, ended.prompt_tokens + ended.completion_tokens, now)
        return self._table.turn_ended(
            activity.key,
            gateway,
            now,
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            turn=activity.turn,
            answer=messages.end_of(ended.answer) if ended.HasField("answer") else None,
        )
