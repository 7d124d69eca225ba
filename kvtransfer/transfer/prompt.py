"""What a prompt's KV depends on, as a digest that two engines can compare.

Both legs render the client's request on their own; a template with a clock, or a proxy that changed one of
the two, would otherwise give a decoder the KV of another prompt. vLLM's block hashes cannot tell: they start
from a number that every process draws for itself.
"""

from array import array
from typing import Any

import xxhash


def prompt_digest(request: Any) -> str:
    digest = xxhash.xxh3_128(array("q", request.prompt_token_ids or ()).tobytes())
    adapter = request.lora_request.lora_name if request.lora_request else ""
    parts = [adapter, *(feature.identifier for feature in request.mm_features)]
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()
