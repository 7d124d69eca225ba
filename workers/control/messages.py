"""Between the messages on the wire and the plain data of the rooms."""

from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from placement.engines import EngineInfo, EngineState, Role
from workers.board import Change, Phase, Status
from workers.control import control_pb2 as pb


def to_message(change: Change) -> pb.Change:
    return pb.Change(
        status=pb.Status(**asdict(change.status)) if change.status else None,
        up=pb.Engine(**asdict(change.up)) if change.up else None,
        down=pb.Engine(**asdict(change.down)) if change.down else None,
        state=pb.State(**asdict(change.state)) if change.state else None,
    )


def from_message(message: pb.Change) -> Change:
    return Change(
        status=_status(message.status) if message.HasField("status") else None,
        up=_engine(message.up) if message.HasField("up") else None,
        down=_engine(message.down) if message.HasField("down") else None,
        state=_state(message.state) if message.HasField("state") else None,
    )


def _status(message: pb.Status) -> Status:
    values = _values(message)
    return Status(**{**values, "phase": Phase(values["phase"]), "log_lines": tuple(values["log_lines"])})


def _engine(message: pb.Engine) -> EngineInfo:
    values = _values(message)
    return EngineInfo(**{**values, "role": Role(values["role"])})


def _state(message: pb.State) -> EngineState:
    values = _values(message)
    news = {name: tuple(values[name]) for name in ("confirmed", "parked")}
    return EngineState(**{**values, **news})


def _values(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
