"""What the journal holds: one self-contained JSON record a change, replayed in order."""

from dataclasses import asdict
from typing import Any

import orjson

from placement.bindings import Binding
from placement.engines import EngineInfo, Role
from router.directory.conversations import Conversation
from router.identity.chain import End

_NOT_KEPT = ("running", "gateway")


def put(conversation: Conversation, binding: Binding | None) -> bytes:
    fields = asdict(conversation)
    for name in _NOT_KEPT:
        del fields[name]
    bound = [binding.engine, binding.epoch, binding.bound_at] if binding else None
    return orjson.dumps({"k": "put", "c": fields, "b": bound})


def end(key: str, cause: str, at: float) -> bytes:
    return orjson.dumps({"k": "end", "key": key, "cause": cause, "at": at})


def turn(key: str, at: float, node: End, alias: bool = False) -> bytes:
    return orjson.dumps({"k": "turn", "key": key, "at": at, "n": _node(node), "alias": alias})


def done(conversation: Conversation) -> bytes:
    return orjson.dumps(
        {
            "k": "done",
            "key": conversation.key,
            "at": conversation.used_at,
            "turns": conversation.turns,
            "prompt_tokens": conversation.prompt_tokens,
            "completion_tokens": conversation.completion_tokens,
            "output_tokens": conversation.output_tokens,
        }
    )


def unbound(key: str) -> bytes:
    return orjson.dumps({"k": "unbound", "key": key})


def engine(info: EngineInfo) -> bytes:
    return orjson.dumps({"k": "engine", "i": asdict(info)})


def engine_gone(name: str) -> bytes:
    return orjson.dumps({"k": "engine_gone", "engine": name})


def read(payload: bytes) -> dict[str, Any]:
    record: dict[str, Any] = orjson.loads(payload)
    return record


def read_node(fields: list[Any]) -> End:
    return End(bytes.fromhex(fields[0]), fields[1], bytes.fromhex(fields[2]))


def read_engine(fields: dict[str, Any]) -> EngineInfo:
    return EngineInfo(**{**fields, "role": Role(fields["role"])})


def _node(node: End) -> list[Any]:
    return [node.link.hex(), node.tail_bytes, node.tail_digest.hex()]
