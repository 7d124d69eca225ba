"""Hashes a prompt into a chain, with one hash for each message and all messages before it.

Prompts that begin with the same messages thus begin with the same hashes. A message is first brought into a
canonical form, so that a prefix is recognised however a client writes it. The form ignores whether content is
a string or one text part, whether a field is null, empty or missing, how the arguments of a tool call are
spaced, cache markers, and the ids and states of response items.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from xxhash import xxh3_128, xxh3_128_digest

from router.errors import BadIdentity

# Fields that clients add, move or drop between turns without changing the prompt.
_UNSTABLE = frozenset({"cache_control", "annotations", "status", "index"})
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_ITEM_UNSTABLE = frozenset({"id", "status"})

BLOCK_BYTES = 256  # bytes of a plain prompt that one link of its chain covers
MOST_PREFIXES = 3  # messages that conversations may share: the system's, the developer's, an example
MOST_MESSAGES = 6  # a request with more messages gets no shared prefix
MEDIA_BYTES = 4096  # counted for each image, sound or file, because its real size does not tell its tokens
OTHERS, WRITTEN, REASONED = range(3)  # author: others, the assistant, the assistant with reasoning
_REASONING = ("reasoning", "reasoning_content", "thinking")
_ANSWERS = ("function_call", "reasoning", "custom_tool_call")  # items of the responses API
_MEDIA = frozenset(
    {
        *("image", "image_url", "image_embeds", "image_pil", "input_image", "image_generation_call"),
        *("audio_url", "audio_embeds", "input_audio", "video_url"),
        *("document", "file", "file_data", "input_file", "computer_screenshot"),
    }
)  # types of parts and items, and fields by which vLLM knows parts without a type
# Fields of media parts that are text, and those that the canonical form leaves out.
_SHOWN = frozenset({"text", "content", "title", "context", "name"}) | _UNSTABLE | _ITEM_UNSTABLE


def canonical(message: object) -> bytes:
    """Return the canonical form of a message."""
    if type(message) is dict and len(message) == 2:  # the most common shape needs no rewriting
        role, content = message.get("role"), message.get("content")
        if type(role) is str and type(content) is str:
            return _plain(role, content)
    if isinstance(message, dict):
        message = _message(message)
        role, content = message.get("role"), message.get("content", "")
        if isinstance(role, str) and isinstance(content, str) and message.keys() <= {"role", "content"}:
            return _plain(role, content)
    try:
        return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError) as error:
        raise BadIdentity("a message is nested too deeply") from error


def _plain(role: str, content: str) -> bytes:
    return f"{role}\0{content}".encode("utf-8", "surrogatepass")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    drop = _UNSTABLE
    if "type" in message:  # an item of the responses API: its id is the server's, not part of the prompt
        drop = _UNSTABLE | _ITEM_UNSTABLE
    kept = {name: value for name, value in message.items() if name not in drop and _present(value)}
    if kept.get("type") == "message":
        del kept["type"]
    if "content" in kept:
        kept["content"] = _content(kept["content"])
    if "tool_calls" in kept and isinstance(kept["tool_calls"], list):
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    if isinstance(kept.get("arguments"), str):
        kept["arguments"] = _arguments(kept["arguments"])
    return kept


def _present(value: object) -> bool:
    return value is not None and value != [] and value != ""


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return parts


def _part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    kept = {name: value for name, value in part.items() if name not in _UNSTABLE and _present(value)}
    if kept.get("type") in _TEXT_TYPES and kept.keys() <= {"type", "text"}:
        return kept.get("text", "")
    return kept


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    kept = {name: value for name, value in call.items() if name not in _UNSTABLE and _present(value)}
    function = kept.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        kept["function"] = {**function, "arguments": _arguments(function["arguments"])}
    return kept


def _size_of(message: object, data: bytes) -> tuple[int, int]:
    """Return the text bytes of a message, and the number of its images, sounds and files."""
    if isinstance(message, dict) and isinstance(message.get("content"), str) and "type" not in message:
        return len(data), 0
    characters, media = media_in(message)
    return len(data) - characters + media * MEDIA_BYTES, media


def media_in(messages: object) -> tuple[int, int]:
    """Return the total characters of the images, sounds and files in messages, and how many there are."""
    media = [_characters(part) for part in _media_parts(messages)]
    return sum(media), len(media)


def _media_parts(parts: object) -> Iterator[Mapping[str, Any]]:
    """Yield the media parts in messages, including those inside tool results."""
    for part in parts if isinstance(parts, list) else [parts]:
        if isinstance(part, dict) and _is_media(part):
            yield part
        elif isinstance(part, dict):
            for field in ("content", "output"):
                if isinstance(part.get(field), list | dict):
                    yield from _media_parts(part[field])


def _is_media(part: Mapping[str, Any]) -> bool:
    if "role" in part:  # a message, whatever else it contains
        return False
    kind = part.get("type")
    if kind == "document":
        source = part.get("source")
        return not (isinstance(source, dict) and source.get("type") in ("text", "content"))
    if isinstance(kind, str):
        return kind in _MEDIA
    return not _MEDIA.isdisjoint(part)


def _characters(value: object) -> int:
    """Count the characters of a media part that no chat template renders, such as an image's bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(one) for name, one in value.items() if name not in _SHOWN)
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _arguments(text: str) -> Any:
    """Parse the arguments of a tool call, because frameworks send the same JSON back with other spacing."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


@dataclass(frozen=True, slots=True)
class End:
    """Point where a request's prompt ended, relative to a link of its chain."""

    link: bytes
    tail_bytes: int = 0  # prompt bytes after the link, when a plain prompt does not end with a block
    tail_digest: bytes = b""  # hash of the link and the tail

    @property
    def digest(self) -> bytes:
        return self.tail_digest or self.link


@dataclass(frozen=True, slots=True)
class Chain:
    """Hashes of the prefixes of a prompt, one for each message or block."""

    links: tuple[bytes, ...]
    sizes: tuple[int, ...]  # prompt bytes up to each link, with `MEDIA_BYTES` for each image, sound or file
    end: End
    total_bytes: int
    text: bytes = b""  # text of a plain prompt, in which known tails are looked for
    media: int = 0  # number of images, sounds and files

    def digest_at(self, index: int, tail_bytes: int) -> bytes | None:
        """Return the digest of the prefix that ends `tail_bytes` after link `index`; None beyond the text."""
        if not tail_bytes:
            return self.links[index]
        start = self.sizes[index]
        tail = self.text[start : start + tail_bytes]
        return _tail_digest(self.links[index], tail) if len(tail) == tail_bytes else None


def seed(space: str, model: str, user: str = "") -> bytes:
    """Return the hash that a chain starts from; prompts of different owners, models or users never match."""
    return xxh3_128_digest(f"{space}\0{model}\0{user}".encode("utf-8", "surrogatepass"))


def of_group(start: bytes, group: str) -> bytes:
    """Mix a group's name into the start of a chain, so that prompts of different groups never match."""
    return xxh3_128_digest(start + group.encode()) if group else start


def of_messages(start: bytes, messages: Iterable[object]) -> Chain:
    """Return the chain of a list of messages, one link per message."""
    links: list[bytes] = []
    sizes: list[int] = []
    link, size, media = start, 0, 0
    for message in messages:
        data = canonical(message)
        more, found = _size_of(message, data)
        size, media = size + more, media + found
        link = xxh3_128_digest(link + data)
        links.append(link)
        sizes.append(size)
    if not links:
        return Chain((start,), (0,), End(start), 0)
    return Chain(tuple(links), tuple(sizes), End(link), size, media=media)


def of_text(start: bytes, text: bytes) -> Chain:
    """Return the chain of a plain prompt, one link for each `BLOCK_BYTES` of its text.

    The bytes after the last link are a tail that is compared exactly, because prompts with a common
    beginning and different last words are not one conversation.
    """
    running = xxh3_128(start)
    links, sizes = [running.digest()], [0]
    whole = len(text) - len(text) % BLOCK_BYTES
    for at in range(0, whole, BLOCK_BYTES):
        running.update(text[at : at + BLOCK_BYTES])
        links.append(running.digest())
        sizes.append(at + BLOCK_BYTES)
    tail = len(text) - whole
    end = End(links[-1], tail, _tail_digest(links[-1], text[whole:])) if tail else End(links[-1])
    return Chain(tuple(links), tuple(sizes), end, len(text), text)


def messages_of(body: Mapping[str, Any]) -> list[object] | None:
    """Return the messages of a body of any API, system message first; None for a plain prompt."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return _system(body.get("system")) + messages
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if isinstance(given, list):
        instructions = body.get("instructions")
        system: list[object] = [{"role": "system", "content": instructions}] if instructions else []
        return system + given
    return None


def of_prompt(start: bytes, body: Mapping[str, Any]) -> Chain:
    """Return the chain of a body without messages. A prompt of unknown shape becomes one opaque link."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return of_text(start, prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        with suppress(OverflowError):  # too large for token ids; the engine will refuse them
            return of_text(xxh3_128_digest(start + b"tokens"), array("q", prompt).tobytes())
    return of_messages(start, [prompt])


def _system(system: object) -> list[object]:
    """Return Anthropic's `system` field as a list of one message, or an empty list.

    Claude Code's billing block is left out: it changes with every request, and engines do not put it into
    the prompt.
    """
    if isinstance(system, list):
        system = [part for part in system if not _is_billing(part)]
    return [{"role": "system", "content": system}] if system else []


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


def _tail_digest(link: bytes, tail: bytes) -> bytes:
    """Hash a tail together with its link, which already covers the prompt before it."""
    return xxh3_128_digest(b"tail\0" + link + tail)


def prefixes_of(tools: bytes, messages: Sequence[object]) -> tuple[tuple[bytes, int], ...]:
    """Return digest and size of each prefix that ends with one of the prompt's first messages.

    A prefix includes the tools. Its digest does not depend on owner, group or user, because prompts of
    different ones may begin with the same blocks. A request with more than `MOST_MESSAGES` gets no prefix.
    """
    if len(messages) > MOST_MESSAGES:
        return ()
    found, link, size = [], tools, 0
    for message in messages[:MOST_PREFIXES]:
        data = canonical(message)
        link, size = xxh3_128_digest(link + data), size + _size_of(message, data)[0]
        found.append((link, size))
    return tuple(found)


def message_authors(messages: Iterable[object]) -> bytes:
    """Return one byte per message, which says who wrote it: OTHERS, WRITTEN or REASONED."""
    return bytes(map(_author, messages))


def _author(message: object) -> int:
    if not isinstance(message, dict):
        return OTHERS
    if message.get("role") != "assistant" and message.get("type") not in _ANSWERS:
        return OTHERS
    return REASONED if _has_reasoning(message) else WRITTEN


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if any(isinstance(part, dict) and part.get("type") in _REASONING for part in parts):
        return True
    if message.get("type") in _REASONING or any(message.get(name) for name in _REASONING):
        return True
    return isinstance(content, str) and "</think>" in content
