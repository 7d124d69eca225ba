"""Limits on what a request may cost an engine: by the length of its prompt and by its answers.

Prompt: an engine tokenises all of a prompt before it counts its tokens, even if `truncate_prompt_tokens` asks
it to cut the prompt. One thread does that for all requests: 10 MiB of text held it for 20 s and took 3 GiB of
memory. So a prompt is measured here, in bytes of JSON, with all that becomes part of it: messages with their
tool calls and reasoning, tools, documents, arguments of the template. It is refused if it has more bytes than
text of the largest context can have.

Answers: an engine makes a request of its own for each answer to each prompt. At every step it lists
log-probabilities and looks for bad words in each of these requests, in loops that all requests wait for. So
the number of answers is limited, and so are log-probabilities and bad words, counted over all answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from router.errors import ApiError, BadRequest, ContextTooLong, Unavailable
from router.identity.prefix_chain import MEDIA_BYTES, media_in
from router.requests.field_checks import BodyPart
from router.requests.fields import MAX_STEP_TOKEN_IDS, fields_of

# Prose and source code have 3 to 5 bytes a token. Only runs of spaces or of one character have many more.
MAX_BYTES_PER_TOKEN = 16
MAX_ANSWERS = 8  # to one turn; each counts as one of its key's turns
MOST_TOKENS_OF_SEVERAL = 131_072  # in all prompts of one request, unless the context is larger
UNKNOWN_CONTEXT = 65_536  # tokens, while no engine is known
_WITH_MEDIA = ("messages", "input")  # fields with parts that engines do not tokenise
_SEVERAL = {"/v1/completions": "prompt", "/v1/embeddings": "input"}  # fields that may list several prompts
MOST_OFFLINE_ANSWERS = 128  # to one line of a batch job; turns are served before it
MOST_LOG_PROBABILITIES = 128  # in one step, for all answers
MOST_PROMPT_LOG_PROBABILITIES = 20_000
MOST_BAD_WORDS = 128  # for all answers
_BYTES_PER_TOKEN = 4  # assumed for a prompt whose log-probabilities are asked for
_RENDERED = ("messages", "prompt", "tools", "documents", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Limits of the fleet on the length of a prompt and on the number of answers to it."""

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
        """Return the size of `value` as JSON in bytes. If `with_media`, the bytes of its media do not count.

        Each token id counts as `max_bytes_per_token`.
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


def check_answers(body: Mapping[str, Any], most: int) -> int:
    """Return how many answers a body asks for. `body` has no unknown fields.

    Raises BadRequest if it asks for too many answers, bad words or log-probabilities.
    """
    answers = count_answers(body)
    if answers > most:
        prompts = _count_prompts(body)
        asked = f"{answers} answers" if prompts == 1 else f"{answers} answers to {prompts} prompts"
        param = "prompt" if answers == prompts else "n"
        raise BadRequest(f"the request asks for {asked}; it may ask for {most}", param=param)
    if (words := answers * len(body.get("bad_words") or ())) > MOST_BAD_WORDS:
        asked = f"{words} bad_words, for {answers} answers"
        raise BadRequest(f"the request has {asked}; it may have {MOST_BAD_WORDS}", param="bad_words")
    _check_log_probabilities(body, answers)
    return answers


def count_answers(body: Mapping[str, Any]) -> int:
    """Return the number of answers to all prompts of a checked body."""
    return _of_each_prompt(body) * _count_prompts(body)


def _check_log_probabilities(body: Mapping[str, Any], answers: int) -> None:
    names = ("logprobs", "top_logprobs", "logprob_token_ids")
    listed = {name: _listed(body.get(name)) for name in names}
    field = max(names, key=lambda name: listed[name])
    if (entries := answers * (listed[field] + 1)) > MOST_LOG_PROBABILITIES:
        asked = f"{entries} log-probabilities a token, for {answers} answers"
        bound = f"it may ask for {MOST_LOG_PROBABILITIES}"
        raise BadRequest(f"the request asks for {asked}; {bound}: lower {field} or n", param=field)
    of_prompt = body.get("prompt_logprobs")
    if of_prompt is None and body.get("echo") and ("messages" in body or body.get("logprobs") is not None):
        of_prompt, field = listed[field], "echo"
    elif of_prompt is None:
        return
    else:
        of_prompt, field = _listed(of_prompt), "prompt_logprobs"
    tokens = _prompt_tokens(body)
    if tokens * (of_prompt + 1) * _of_each_prompt(body) > MOST_PROMPT_LOG_PROBABILITIES:
        asked = f"{of_prompt + 1} log-probabilities for each of about {tokens} prompt tokens"
        bound = f"it may ask for {MOST_PROMPT_LOG_PROBABILITIES} in all"
        raise BadRequest(f"the request asks for {asked}; {bound}", param=field)


def _of_each_prompt(body: Mapping[str, Any]) -> int:
    return int(body.get("n") or 1)


def _count_prompts(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    return max(1, len(prompt)) if isinstance(prompt, list) and token_ids(prompt) is None else 1


def _listed(value: Any) -> int:
    """Return for how many tokens beside the sampled one a field requests log-probabilities.

    The value -1 requests them for the whole vocabulary.
    """
    if isinstance(value, list):
        return len(value)
    number = 0 if value is None or isinstance(value, bool) else int(value)
    return number if number >= 0 else MAX_STEP_TOKEN_IDS


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    """Estimate the tokens of all prompts of a body."""
    if (ids := token_ids(body.get("prompt"))) is not None:
        return len(ids)
    characters, media = media_in(body.get("messages"))
    size = sum(len(orjson.dumps(body[name])) for name in _RENDERED if name in body)
    return (size - characters + media * MEDIA_BYTES) // _BYTES_PER_TOKEN
