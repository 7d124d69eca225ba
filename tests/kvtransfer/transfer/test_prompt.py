"""Two engines agree on a prompt's digest exactly when its KV is the same."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from kvtransfer.transfer.scheduler import prompt_digest


@dataclass
class PromptRequest:
    prompt_token_ids: list[int]
    lora_request: SimpleNamespace | None = None
    mm_features: list[SimpleNamespace] = field(default_factory=list)


def test_the_digest_covers_tokens_adapter_and_images() -> None:
    same = prompt_digest(PromptRequest([1, 2, 3]))
    assert same == prompt_digest(PromptRequest([1, 2, 3]))
    others = [
        PromptRequest([1, 2, 4]),
        PromptRequest([1, 2]),
        PromptRequest([1, 2, 3], lora_request=SimpleNamespace(lora_name="a")),
        PromptRequest([1, 2, 3], mm_features=[SimpleNamespace(identifier="image")]),
    ]
    assert len({same, *map(prompt_digest, others)}) == 5
