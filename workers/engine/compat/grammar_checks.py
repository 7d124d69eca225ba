"""Patches of vLLM's structured outputs, and the private names that they use, checked when an engine starts.

vLLM parses a grammar in its front end's event loop and compiles it in the engine core, both without a limit.
With these patches the front end parses no grammar. Instead, a request waits for the result of the compiling
process (`compile_process.py`). The engine core compiles only grammars within the budget.
"""

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from kvtransfer.compat.relied_on import ReliedOn, verify

_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
_XGRAMMAR = "vllm.v1.structured_output.backend_xgrammar"

GRAMMAR_CHECKS = ReliedOn(
    signatures={
        _LLM: {
            "add_request": (
                "self",
                "request_id",
                "prompt",
                "params",
                "arrival_time",
                "lora_request",
                "tokenization_kwargs",
                "trace_headers",
                "priority",
                "data_parallel_rank",
                "session_id",
                "prompt_text",
                "reasoning_ended",
                "reasoning_parser_kwargs",
                "kv_hints",
            ),
        },
        "vllm.sampling_params:SamplingParams": {
            "_validate_structured_outputs": (
                "self",
                "model_config",
                "structured_outputs_config",
                "tokenizer",
            ),
        },
        _XGRAMMAR: {
            "validate_xgrammar_grammar": ("sampling_params",),
            "has_xgrammar_unsupported_json_features": ("schema",),
        },
        f"{_XGRAMMAR}:XgrammarBackend": {
            "compile_grammar": ("self", "request_type", "grammar_spec", "stop_token_ids"),
        },
        "vllm.v1.structured_output.request": {"get_structured_output_key": ("params",)},
        "vllm.tokenizers": {"cached_tokenizer_from_config": ("model_config", "kwargs")},
    },
    attributes={
        _LLM: ("vllm_config",),
        "vllm.sampling_params:StructuredOutputsParams": ("_backend", "_backend_was_auto"),
        "vllm.sampling_params:SamplingParams": (
            "structured_outputs",
            "bad_words",
            "logit_bias",
            "allowed_token_ids",
            "extra_args",
        ),
    },
    uses={
        _LLM: {"add_request": ("process_inputs",), "generate": ("add_request",)},
        "vllm.sampling_params:SamplingParams": {"verify": ("_validate_structured_outputs",)},
    },
)

_BACKENDS = {
    "xgrammar": f"{_XGRAMMAR}:XgrammarBackend",
    "guidance": "vllm.v1.structured_output.backend_guidance:GuidanceBackend",
    "outlines": "vllm.v1.structured_output.backend_outlines:OutlinesBackend",
    "lm-format-enforcer": "vllm.v1.structured_output.backend_lm_format_enforcer:LMFormatEnforcerBackend",
}


@dataclass
class CheckedGrammar(StructuredOutputsParams):
    """Grammar that the compiling process has compiled within its budget."""


_NAMES = tuple(field.name for field in fields(StructuredOutputsParams))


def constraint_of(params: StructuredOutputsParams) -> dict[str, Any]:
    """Return the fields of a constraint that are set, as plain data."""
    return {name: value for name in _NAMES if (value := getattr(params, name)) not in (None, False)}


def _params(constraint: dict[str, Any], kind: type[StructuredOutputsParams]) -> StructuredOutputsParams:
    given = {name: value for name, value in constraint.items() if not name.startswith("_")}
    made = kind(**given)
    for name in constraint.keys() - given.keys():
        setattr(made, name, constraint[name])
    return made


class Backends:
    """vLLM's backends for grammars, used as the engine core uses them."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        verify(GRAMMAR_CHECKS)
        self._config = vllm_config
        self._tokenizer = cached_tokenizer_from_config(model_config=vllm_config.model_config)
        self._made: dict[str, Any] = {}
        wanted = vllm_config.structured_outputs_config.backend
        self._backend("xgrammar" if wanted == "auto" else wanted)
        self._validated({"json_object": True})  # imports what forks would have to import otherwise

    def compile(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """Validate and compile a constraint, and return the fields that vLLM's validation changed."""
        from vllm.v1.structured_output.request import get_structured_output_key

        made = self._validated(constraint)
        self._backend(str(made._backend)).compile_grammar(*get_structured_output_key(made))
        after = {name: getattr(made, name) for name in _NAMES}
        return {name: value for name, value in after.items() if value != constraint.get(name)}

    def _validated(self, constraint: dict[str, Any]) -> StructuredOutputsParams:
        made = _params(constraint, StructuredOutputsParams)
        config = self._config
        SamplingParams(structured_outputs=made)._validate_structured_outputs(
            config.model_config, config.structured_outputs_config, self._tokenizer
        )
        return made

    def _backend(self, name: str) -> Any:
        if name not in self._made:
            module, _, kind = _BACKENDS[name].partition(":")
            made = getattr(__import__(module, fromlist=[kind]), kind)
            vocabulary = self._config.model_config.get_vocab_size()
            self._made[name] = made(self._config, tokenizer=self._tokenizer, vocab_size=vocabulary)
        return self._made[name]


Check = Callable[[Any, dict[str, Any]], Awaitable[dict[str, Any]]]


def check_grammars(check: Check, accepted: Callable[[], Awaitable[None]]) -> None:
    """Patch this process so that a request with a grammar first waits for `check(vllm_config, constraint)`.

    The check returns the fields that vLLM's validation would set, or raises the error that the client gets.
    `accepted` is called after each request, with or without a grammar, has been given to the engine core.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.structured_output import backend_xgrammar

    adding, validating = AsyncLLM.add_request, SamplingParams._validate_structured_outputs
    if hasattr(adding, "__wrapped__"):
        return
    verify(GRAMMAR_CHECKS)

    @functools.wraps(adding)
    async def add_request(
        self: AsyncLLM, request_id: str, prompt: Any, params: Any, *rest: Any, **more: Any
    ) -> Any:
        asked = params.structured_outputs if isinstance(params, SamplingParams) else None
        if asked is not None and _is_prefill_leg(params):
            params.structured_outputs = None  # its single token is thrown away
        elif asked is not None and not isinstance(asked, CheckedGrammar):
            constraint = constraint_of(asked)
            found = await check(self.vllm_config, constraint)
            params.structured_outputs = _params({**constraint, **found}, CheckedGrammar)
        queue = await adding(self, request_id, prompt, params, *rest, **more)
        await accepted()
        return queue

    @functools.wraps(validating)
    def _validate_structured_outputs(self: SamplingParams, *rest: Any) -> None:
        asked = self.structured_outputs
        if asked is not None and not isinstance(asked, CheckedGrammar):
            raise VLLMValidationError("this engine accepts only grammars compiled within their budget")

    def validate_xgrammar_grammar(sampling_params: SamplingParams) -> None:
        """Check only for unsupported features, because the event loop calls this while it reads a request."""
        asked = sampling_params.structured_outputs
        schema = asked.json if asked is not None else None
        if isinstance(schema, dict) and backend_xgrammar.has_xgrammar_unsupported_json_features(schema):
            raise VLLMValidationError("the JSON schema has features that xgrammar does not support")

    AsyncLLM.add_request = add_request
    SamplingParams._validate_structured_outputs = _validate_structured_outputs
    backend_xgrammar.validate_xgrammar_grammar = validate_xgrammar_grammar


def _is_prefill_leg(params: SamplingParams) -> bool:
    transfer = (params.extra_args or {}).get("kv_transfer_params") or {}
    return bool(transfer.get("do_remote_decode"))
