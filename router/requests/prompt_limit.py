"""Limit on the length of a prompt, before tokenisation: for turns, token counts, embeddings and batches.

An engine tokenises all of a prompt before it counts its tokens, also where `truncate_prompt_tokens` asks it
to cut the prompt. One thread does that for all requests: 10 MiB of text held it for 20 s and took 3 GiB of
memory. So a prompt is measured here, in bytes of JSON, with all that becomes part of it: messages with their
tool calls and reasoning, tools, documents, arguments of the template. It is refused if the largest context
could hold it only with more bytes a token than text has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.errors import ApiError, ContextTooLong, Unavailable
from router.identity.prefix_chain import media_in
from router.requests.field_checks import BodyPart
from router.requests.fields import fields_of

# Prose and source code have 3 to 5 bytes a token. Only rows of spaces or of one sign have many more.
MAX_BYTES_PER_TOKEN = 16
MAX_ANSWERS = 8  # of a turn; each counts as one of its key's turns
MOST_TOKENS_OF_SEVERAL = 131_072  # of all prompts of one request, where the context is smaller
UNKNOWN_CONTEXT = 65_536  # tokens, while no engine is known
_WITH_MEDIA = ("messages", "input")  # fields with parts that engines do not tokenise
_SEVERAL = {"/v1/completions": "prompt", "/v1/embeddings": "input"}  # fields that may list several prompts


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The longest prompt, and the most answers to it, that the fleet accepts."""

    max_context: int  # tokens of the largest engine; 0 while none is known
    max_bytes_per_token: int = MAX_BYTES_PER_TOKEN
    max_answers: int = MAX_ANSWERS

    def check(self, path: str, body: Mapping[str, Any]) -> None:
        """Refuse a checked body whose prompt fits in no engine. `path` is its endpoint."""
        known = fields_of(path)
        fields = [name for name in body if name in known and known[name].part is BodyPart.PROMPT]
        listing = _SEVERAL.get(path)
        sizes = {name: self._size(body[name], name in _WITH_MEDIA) for name in fields if name != listing}
        beside = sum(sizes.values())
        each = [self._size(prompt) for prompt in _prompts(body.get(listing))] if listing else []
        context = self.max_context or UNKNOWN_CONTEXT
        longest = max(each, default=0)
        if self._tokens(beside + longest) > context:
            largest = max(sizes, key=lambda name: sizes[name], default=None)
            param = largest if largest and sizes[largest] > longest else listing
            bound = f"the largest engine of this fleet takes {context}"
            raise self._refusal(f"{param} makes a prompt of", beside + longest, bound, param, body)
        most = max(context, MOST_TOKENS_OF_SEVERAL)
        size, bound = len(each) * beside + sum(each), f"those of one request may have {most}"
        if self._tokens(size) > most:
            raise self._refusal(f"{listing} lists prompts of", size, bound, listing, body)

    def _tokens(self, size: int) -> int:
        return -(-size // self.max_bytes_per_token)

    def _size(self, value: object, with_media: bool = False) -> int:
        """Return the bytes of JSON, without media if the field may have any.

        Token ids count as the most bytes they can stand for.
        """
        if (ids := token_ids(value)) is not None:
            return len(ids) * self.max_bytes_per_token
        size = len(orjson.dumps(value))
        return size - media_in(value)[0] if with_media else size

    def _refusal(
        self, what: str, size: int, bound: str, param: str | None, body: Mapping[str, Any]
    ) -> ApiError:
        if not self.max_context:
            return Unavailable(
                "no engine is up that could take so long a prompt; try again", retry_after_s=5.0
            )
        counted = f"at least {self._tokens(size)} tokens, counted at {self.max_bytes_per_token} bytes each"
        cut = ". Cut it before you send it: an engine tokenises all of a prompt before it cuts it"
        advice = cut if body.get("truncate_prompt_tokens") else ""
        return ContextTooLong(f"{what} {counted}; {bound}{advice}", param=param)


def token_ids(prompt: object) -> list[int] | None:
    """Return the prompt if it is a list of token ids only, otherwise None."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int and set(map(type, prompt)) == {int}:
        return prompt
    return None


def _prompts(value: object) -> list[object]:
    return value if isinstance(value, list) and token_ids(value) is None else [value]
