"""Converts conversations, bindings, ends of prompts (as hashes) and engines to journal rows and back."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import orjson

from placement.engines import EngineInfo
from placement.routing.bindings import Binding
from router.directory.conversations import ConversationRecord
from router.directory.journal import CONVERSATION, ENGINE, NODE, TURNS, JournalError, Row
from router.identity.prefix_chain import End

_WHOLE, _BINDING = "whole", "binding"
_BOUND = tuple[str, int, float]  # engine, epoch, since when
_COUNTS = ("used_at", "turns", "prompt_tokens", "completion_tokens", "output_tokens", "ttl_s")
_NOT_KEPT = ("running", "gateway", "placed", "prefix", "moves_from")


def placed(conversation: ConversationRecord, binding: Binding) -> Iterator[Row]:
    fields = asdict(conversation)
    for name in _NOT_KEPT:
        del fields[name]
    subject = CONVERSATION + conversation.key
    yield Row(subject, _WHOLE, orjson.dumps(fields))
    yield Row(subject, _BINDING, orjson.dumps([binding.engine, binding.epoch, binding.bound_at]))


def turn_ended(conversation: ConversationRecord) -> Row:
    counts = {name: getattr(conversation, name) for name in _COUNTS}
    return Row(CONVERSATION + conversation.key, TURNS, orjson.dumps(counts))


def node(key: str, at: float, end: End) -> Row:
    place = [end.link.hex(), end.tail_bytes, end.tail_digest.hex(), at]
    return Row(CONVERSATION + key, NODE + end.digest.hex(), orjson.dumps(place))


def unbound(key: str) -> Row:
    return Row(CONVERSATION + key, _BINDING)


def ended(key: str) -> Row:
    return Row(CONVERSATION + key)


def engine(info: EngineInfo) -> Row:
    return Row(ENGINE + info.engine, _WHOLE, orjson.dumps(asdict(info)))


def engine_gone(name: str) -> Row:
    return Row(ENGINE + name)


@dataclass(slots=True)
class Remembered:
    """Engines and conversations rebuilt from a journal, in order of use."""

    engines: list[EngineInfo]
    conversations: list[tuple[ConversationRecord, tuple[str, int, float] | None, list[End]]]


def remembered(rows: list[Row]) -> Remembered:
    """Rebuild engines and conversations from rows. Fields of newer versions are ignored."""
    try:
        return _remembered(rows)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as wrong:
        raise JournalError(
            f"a row of the directory's journal cannot be read ({wrong}): it is damaged, or of a newer "
            "version. Start that version, or move the journal away (its conversations begin anew)"
        ) from wrong


def _remembered(rows: list[Row]) -> Remembered:
    subjects: dict[str, dict[str, Any]] = {}
    for row in rows:
        slots = subjects.setdefault(row.subject, {})
        slots.pop(row.slot, None)
        if row.payload is not None:
            slots[row.slot] = orjson.loads(row.payload)
        elif not row.slot:
            del subjects[row.subject]
    found = Remembered([], [])
    for subject, slots in subjects.items():
        whole = slots.get(_WHOLE)
        if whole is None:
            continue
        if subject.startswith(ENGINE):
            found.engines.append(msgspec.convert(whole, EngineInfo))
            continue
        record = msgspec.convert({**whole, **slots.get(TURNS, {})}, ConversationRecord)
        nodes = []
        for slot, place in slots.items():
            if slot.startswith(NODE):
                nodes.append(End(bytes.fromhex(place[0]), place[1], bytes.fromhex(place[2])))
                record.used_at = max(record.used_at, place[-1])
        record.used_at = max(record.used_at, whole["used_at"])
        bound = msgspec.convert(slots[_BINDING][:3], _BOUND) if _BINDING in slots else None
        found.conversations.append((record, bound, nodes))
    found.conversations.sort(key=lambda one: one[0].used_at)
    return found
