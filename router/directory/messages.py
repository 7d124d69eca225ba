"""Between the wire's messages and the rooms' own data."""

from collections.abc import Iterable
from dataclasses import asdict, fields

import orjson

from placement.admission import Refusal, RefusalReason
from placement.advice import Action, Recommendation
from placement.capacity import Signals
from placement.engines import EngineInfo, EngineState, Role
from router.directory import directory_pb2 as pb
from router.directory.fleet import EngineView
from router.directory.waiting import Ask, Placed
from router.identity.chain import End


def node(end: End) -> pb.Node:
    return pb.Node(link=end.link, tail_bytes=end.tail_bytes, tail_digest=end.tail_digest)


def end_of(message: pb.Node) -> End:
    return End(message.link, message.tail_bytes, message.tail_digest)


def place_request(ask: Ask) -> pb.PlaceRequest:
    return pb.PlaceRequest(
        key=ask.key,
        gateway=ask.gateway,
        parent=ask.parent or "",
        prompt_tokens=ask.prompt_tokens,
        wait_s=ask.wait_s,
        uncached_tokens=ask.uncached_tokens,
        lost=pb.Epoch(engine=ask.lost[0], epoch=ask.lost[1]) if ask.lost else None,
        end=node(ask.end) if ask.end else None,
        again=ask.again,
        alone=ask.alone,
        turn=ask.turn,
    )


def ask(request: pb.PlaceRequest) -> Ask:
    return Ask(
        key=request.key,
        gateway=request.gateway,
        prompt_tokens=request.prompt_tokens,
        wait_s=request.wait_s,
        parent=request.parent or None,
        uncached_tokens=request.uncached_tokens if request.HasField("uncached_tokens") else None,
        lost=(request.lost.engine, request.lost.epoch) if request.HasField("lost") else None,
        end=end_of(request.end) if request.HasField("end") else None,
        again=request.again,
        alone=request.alone,
        turn=request.turn,
    )


def place_reply(index: int, outcome: Placed | Refusal) -> pb.PlaceReply:
    if isinstance(outcome, Refusal):
        refused = pb.Refused(
            reason=outcome.reason, message=outcome.message, retry_after_s=outcome.retry_after_s
        )
        return pb.PlaceReply(index=index, refused=refused)
    placed = pb.Placed(
        decoder=pb.Epoch(engine=outcome.engine, epoch=outcome.epoch),
        prefiller=outcome.prefiller or "",
        known=outcome.known,
        cause=outcome.cause,
        note=orjson.dumps(outcome.note),
        context_tokens=outcome.context_tokens,
    )
    return pb.PlaceReply(index=index, placed=placed)


def placed_or_refusal(key: str, reply: pb.PlaceReply) -> Placed | Refusal:
    if reply.HasField("refused"):
        refused = reply.refused
        return Refusal(RefusalReason(refused.reason), refused.message, refused.retry_after_s)
    placed = reply.placed
    return Placed(
        key=key,
        engine=placed.decoder.engine,
        epoch=placed.decoder.epoch,
        prefiller=placed.prefiller or None,
        known=placed.known,
        cause=placed.cause,
        note=orjson.loads(placed.note),
        context_tokens=placed.context_tokens,
    )


def capacity_reply(signals: Signals, advice: Iterable[Recommendation]) -> pb.CapacityReply:
    made = [pb.Recommendation(action=one.action, count=one.count, reason=one.reason) for one in advice]
    return pb.CapacityReply(**asdict(signals), advice=made)


def signals(reply: pb.CapacityReply) -> Signals:
    return Signals(**{field.name: getattr(reply, field.name) for field in fields(Signals)})


def advice(reply: pb.CapacityReply) -> tuple[Recommendation, ...]:
    return tuple(Recommendation(Action(one.action), one.count, one.reason) for one in reply.advice)


def engine(view: EngineView, conversations: int, kv_in_use: int) -> pb.Engine:
    info, state = view.info, view.state
    message = pb.Engine(
        engine=info.engine,
        tier=info.tier,
        role=info.role,
        epoch=info.epoch,
        http=info.http,
        transfer=info.transfer,
        control=info.control,
        kv_tokens=info.kv_tokens,
        block_tokens=info.block_tokens,
        max_context=info.max_context,
        suspect=view.suspect,
        conversations=conversations,
        kv_in_use=kv_in_use,
    )
    if state is not None:
        message.live_tokens = state.live_tokens
        message.parked_tokens = state.parked_tokens
        message.offline_tokens = state.offline_tokens
        message.free_tokens = state.free_tokens
        message.running = state.running
        message.waiting = state.waiting
        message.draining = state.draining
        message.seq = state.seq
        message.offline_running = state.offline_running
        message.offline_waiting = state.offline_waiting
        message.host_used_tokens = state.host_used_tokens
        message.host_free_tokens = state.host_free_tokens
        message.host_offline_tokens = state.host_offline_tokens
        message.idle_tokens = state.idle_tokens
    return message


def engine_info(message: pb.Engine) -> EngineInfo:
    return EngineInfo(
        engine=message.engine,
        tier=message.tier,
        role=Role(message.role),
        epoch=message.epoch,
        http=message.http,
        transfer=message.transfer,
        control=message.control,
        kv_tokens=message.kv_tokens,
        block_tokens=message.block_tokens,
        max_context=message.max_context,
    )


def engine_state(message: pb.Engine) -> EngineState:
    return EngineState(
        engine=message.engine,
        epoch=message.epoch,
        seq=message.seq,
        live_tokens=message.live_tokens,
        parked_tokens=message.parked_tokens,
        offline_tokens=message.offline_tokens,
        free_tokens=message.free_tokens,
        running=message.running,
        waiting=message.waiting,
        draining=message.draining,
        offline_running=message.offline_running,
        offline_waiting=message.offline_waiting,
        host_used_tokens=message.host_used_tokens,
        host_free_tokens=message.host_free_tokens,
        host_offline_tokens=message.host_offline_tokens,
        idle_tokens=message.idle_tokens,
    )
