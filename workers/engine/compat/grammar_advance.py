"""Patch of vLLM's structured outputs in the engine core.

A grammar can continue after tokens that another engine generated, and is compiled at a low priority.
"""

import functools
import os
import threading
from bisect import bisect_left
from typing import Any

from kvtransfer.compat.relied_on import ReliedOn
from workers.engine.grammars.config import ENGINE_CORE_NICE

_GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"

BEHIND = "conserve_behind"  # in `extra_args`: how many tokens at the prompt's end another engine generated

GRAMMARS = ReliedOn(
    signatures={
        _GRAMMARS: {
            "_create_grammar": ("self", "request"),
            "_get_constraint_bounds": ("self", "request", "spec_tokens", "spec_tokens_committed"),
            "_get_reasoner": ("self", "request"),
        },
        "vllm.reasoning.abs_reasoning_parsers:ReasoningParser": {
            "is_reasoning_end_streaming": ("self", "input_ids", "delta_ids"),
        },
    },
    attributes={
        _GRAMMARS: ("enable_in_reasoning",),
        "vllm.v1.structured_output.request:StructuredOutputRequest": ("reasoning_ended",),
    },
)


def grammar_start(manager: Any, request: Any, reasoner: Any, tokens: list[int]) -> int:
    """Return the index of the first of `tokens` that the grammar constrains, found by bisection.

    vLLM's `_get_constraint_bounds` would try every token, because it is meant for the tokens of one
    iteration.
    """
    ended = manager.enable_in_reasoning or request.structured_output_request.reasoning_ended
    if ended or reasoner is None or hasattr(reasoner, "find_reasoning_end"):
        return int(manager._get_constraint_bounds(request, tokens, True).grammar_start)
    prompt = request.prompt_token_ids[: -len(tokens)]

    def ended_within(count: int) -> bool:
        first = tokens[:count]
        return bool(reasoner.is_reasoning_end_streaming([*prompt, *first], first))

    return bisect_left(range(1, len(tokens) + 1), True, key=ended_within) + 1


def advance_grammars() -> None:
    """Patch this process so that a grammar first accepts the tokens that another engine generated.

    Threads that compile grammars get a low priority. They release the interpreter's lock while they compile,
    so no iteration waits for them.
    """
    from vllm.v1.structured_output import StructuredOutputManager

    creating = StructuredOutputManager._create_grammar
    if hasattr(creating, "__wrapped__"):
        return

    @functools.wraps(creating)
    def _create_grammar(self: StructuredOutputManager, request: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENGINE_CORE_NICE)
        grammar = creating(self, request)
        count = (request.sampling_params.extra_args or {}).get(BEHIND, 0)
        if count:
            tokens = list(request.prompt_token_ids[-count:])
            asked = request.structured_output_request
            reasoner = self._get_reasoner(request)
            if asked.reasoning_ended is None and reasoner is not None:
                asked.reasoning_ended = reasoner.is_reasoning_end(request.prompt_token_ids[:-count])
            start = grammar_start(self, request, reasoner, tokens)
            if start <= count:
                asked.reasoning_ended = True
                if not grammar.accept_tokens(request.request_id, tokens[start:]):
                    raise ValueError("the tokens that were generated do not follow the grammar")
        return grammar

    StructuredOutputManager._create_grammar = _create_grammar
