"""Logits processor for vLLM that makes a random model give the replies that its prompt contains.

Coding agents need a model that calls their tools. Lines `REPLY: …` of a prompt are its replies: the first is
given before any tool result, the second after one result, and so on. A reply that is a JSON object is a tool
call. A text reply that the prompt repeats, such as a summary, counts as already given. Prefill, transfer,
decoding, tool parser and streaming work as with any model.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCRIPTED = re.compile(r"^REPLY: (.*)$", re.MULTILINE)
TOOL_RESULT = "<|im_start|>user\n<tool_response>"
UNSCRIPTED = "ok"


def reply_to(prompt: str) -> str:
    """Return the scripted reply to a prompt, in the format of `deploy/small_model.jinja`."""
    replies = SCRIPTED.findall(prompt)
    number = prompt.count(TOOL_RESULT)
    for before, text in enumerate(replies):
        if not text.startswith("{") and prompt.count(text) > replies.count(text):
            number = max(number, before + 1)
    reply: str = replies[number] if number < len(replies) else UNSCRIPTED
    return f"<tool_call>\n{reply}\n</tool_call>" if reply.startswith("{") else reply


class ScriptedReplies(LogitsProcessor):
    """Logits processor that allows only the next token of the scripted reply."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._replies: dict[
            int, tuple[list[int], Sequence[int]]
        ] = {}  # by row: the reply, what was generated

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self._replies, batch_update, lambda _, prompt, generated: (self._reply(prompt or []), generated)
        )

    def _reply(self, prompt: list[int]) -> list[int]:
        text = reply_to(self._tokenizer.decode(prompt))
        return [
            *self._tokenizer.encode(text, add_special_tokens=False),
            self._tokenizer.eos_token_id,
        ]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (reply, generated) in self._replies.items():
            token = reply[min(len(generated), len(reply) - 1)]
            logits[row] = float("-inf")
            logits[row, token] = 0.0
        return logits
