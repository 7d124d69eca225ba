"""Limits on what one request makes an engine do for its answers.

An engine makes a request of its own for each answer to each prompt, and lists log-probabilities and looks for
bad words in each of them at every step, in loops that all its requests wait for. So these counts are limited
together.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from router.errors import BadRequest
from router.identity.prefix_chain import MEDIA_BYTES, media_in
from router.requests.fields import MAX_STEP_TOKEN_IDS
from router.requests.prompt_limit import token_ids

MOST_OFFLINE_ANSWERS = 128  # of a line of a batch, which turns go before
MOST_LOG_PROBABILITIES = 128  # of a step, for all answers
MOST_PROMPT_LOG_PROBABILITIES = 20_000
MOST_BAD_WORDS = 128  # for all answers
_BYTES_PER_TOKEN = 4
_PROMPT = ("messages", "prompt", "tools", "documents", "chat_template_kwargs")


def check_answers(body: Mapping[str, Any], most: int) -> int:
    """Return the number of answers that a checked body asks for, or refuse it. Unknown fields are gone."""
    answers = count_answers(body)
    if answers > most:
        prompts = _prompts(body)
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
    return _of_each_prompt(body) * _prompts(body)


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


def _prompts(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    return max(1, len(prompt)) if isinstance(prompt, list) and token_ids(prompt) is None else 1


def _listed(value: Any) -> int:
    """Return how many tokens a field lists beside the sampled one; -1 stands for the whole vocabulary."""
    if isinstance(value, list):
        return len(value)
    number = 0 if value is None or isinstance(value, bool) else int(value)
    return number if number >= 0 else MAX_STEP_TOKEN_IDS


def _prompt_tokens(body: Mapping[str, Any]) -> int:
    """Estimate the tokens of all prompts."""
    if (ids := token_ids(body.get("prompt"))) is not None:
        return len(ids)
    characters, media = media_in(body.get("messages"))
    size = sum(len(orjson.dumps(body[name])) for name in _PROMPT if name in body)
    return (size - characters + media * MEDIA_BYTES) // _BYTES_PER_TOKEN
