"""A prompt as a chain of hashes, each over everything before it, so that a known prefix is a known hash."""

from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128, xxh3_128_digest

from router.identity.canonical import canonical

BLOCK_BYTES = 256


@dataclass(frozen=True, slots=True)
class End:
    """The point where a request's prompt ended, relative to a link of its chain."""

    link: bytes
    tail_bytes: int = 0  # prompt bytes after the link: plain prompts do not end on a block
    tail_digest: bytes = b""  # hash of the prompt up to and with those bytes

    @property
    def digest(self) -> bytes:
        return self.tail_digest or self.link


@dataclass(frozen=True, slots=True)
class Chain:
    links: tuple[bytes, ...]
    sizes: tuple[int, ...]  # prompt bytes up to each link
    end: End
    total_bytes: int
    text: bytes = b""  # plain prompts only: what tails are checked against
    seed: bytes = b""

    def digest_at(self, index: int, tail_bytes: int) -> bytes | None:
        """The digest of this prompt's prefix of that length, None where the prompt is shorter."""
        if not tail_bytes:
            return self.links[index]
        size = self.sizes[index] + tail_bytes
        return _prefix_digest(self.seed, self.text[:size]) if size <= len(self.text) else None


def seed(space: str, model: str, user: str = "") -> bytes:
    """Chains of different keys, models or persons never meet."""
    return xxh3_128_digest(f"{space}\0{model}\0{user}".encode("utf-8", "surrogatepass"))


def of_messages(start: bytes, messages: Iterable[object]) -> Chain:
    links: list[bytes] = []
    sizes: list[int] = []
    link, size = start, 0
    for message in messages:
        data = canonical(message)
        size += len(data)
        link = xxh3_128_digest(link + data)
        links.append(link)
        sizes.append(size)
    if not links:
        return Chain((start,), (0,), End(start), 0)
    return Chain(tuple(links), tuple(sizes), End(link), size)


def of_text(start: bytes, text: bytes) -> Chain:
    """Links at whole blocks; the rest of the last block is a tail that is compared exactly, since
    prompts that share a long beginning and differ in their last words are not one conversation."""
    running = xxh3_128(start)
    links, sizes = [running.digest()], [0]
    whole = len(text) - len(text) % BLOCK_BYTES
    for at in range(0, whole, BLOCK_BYTES):
        running.update(text[at : at + BLOCK_BYTES])
        links.append(running.digest())
        sizes.append(at + BLOCK_BYTES)
    tail = len(text) - whole
    end = End(links[-1], tail, _prefix_digest(start, text)) if tail else End(links[-1])
    return Chain(tuple(links), tuple(sizes), end, len(text), text, start)


def of_pointer(start: bytes, name: str, rest: Chain) -> Chain:
    """A request that names its predecessor instead of repeating it (`previous_response_id`)."""
    before = response_end(start, name).link
    link = xxh3_128_digest(before + rest.end.digest)
    return Chain((before, link), (0, rest.total_bytes), End(link), rest.total_bytes)


def response_end(start: bytes, name: str) -> End:
    """The node of a response's id."""
    return End(xxh3_128_digest(start + b"response\0" + name.encode("utf-8", "surrogatepass")))


def of_body(start: bytes, body: Mapping[str, Any]) -> Chain:
    """The chain of any API's body; what has no known shape is one opaque link."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return of_messages(start, _system(body.get("system")) + messages)
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if isinstance(given, list):
        instructions = body.get("instructions")
        head = [{"role": "system", "content": instructions}] if instructions else []
        return of_messages(start, head + given)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return of_text(start, prompt.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        with suppress(OverflowError):  # not token ids; the engine will say so
            return of_text(xxh3_128_digest(start + b"tokens"), array("q", prompt).tobytes())
    return of_messages(start, [prompt])


def _system(system: object) -> list[object]:
    """Anthropic's system prompt stands beside the messages. Claude Code bills with a block that changes with
    every request; engines leave it out of the prompt."""
    if isinstance(system, list):
        system = [part for part in system if not _is_billing(part)]
    return [{"role": "system", "content": system}] if system else []


def _is_billing(part: object) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


def _prefix_digest(start: bytes, text: bytes) -> bytes:
    return xxh3_128_digest(start + text)
