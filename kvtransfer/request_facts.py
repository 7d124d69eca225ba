"""Functions that derive what plugins need from vLLM's requests, such as the conversation key."""

from typing import Any

from kvtransfer.retention.retained_conversations import RetainedConversation


def is_offline(request: Any) -> bool:
    return bool(request.priority > 0)


def owner_key(request: Any) -> str | None:
    """Return the key of the conversation that owns the request's blocks.

    An offline request counts as a conversation of its own. A prefill leg has no owner here, because its
    conversation lives on the decoder.
    """
    if is_offline(request):
        return f"offline:{request.request_id}"
    if (request.kv_transfer_params or {}).get("do_remote_decode"):
        return None
    return str(request.session_id) if request.session_id else None


def depends_on_tokens_only(request: Any) -> bool:
    """Return whether tokens and salt determine the request's KV: no images, embeddings or adapter."""
    return not (request.mm_features or request.lora_request or request.prompt_embeds is not None)


def apply_client_hints(request: Any, conversation: RetainedConversation) -> None:
    """Record how long the client wants the conversation's KV kept. The gateway has checked the hints."""
    hints = (request.kv_transfer_params or {}).get("conversation") or {}
    conversation.park_after_s = hints.get("park_after_s")
    conversation.ttl_s = hints.get("ttl_s", conversation.ttl_s)


def confirmed_blocks(request: Any, block_tokens: int) -> int:
    """Return the number of the request's full blocks whose KV has certainly been computed.

    Tokens of a step under way do not count, because the step may be rolled back. The result is wrong while a
    background load runs for the request: vLLM counts the tokens of that load as computed.
    """
    confirmed = request.num_computed_tokens - request.num_in_flight_tokens
    return int(min(max(confirmed, 0) // block_tokens, len(request.block_hashes)))


def admitted_now(scheduler_output: Any) -> set[str]:
    """Return the ids of the requests that entered the batch with this step.

    Their prefix hits may be blocks that another request of the same step has yet to compute, because vLLM
    registers blocks before they are computed. From the next step on they are confirmed or rolled back.
    """
    new = {str(request.req_id) for request in scheduler_output.scheduled_new_reqs}
    return new.union(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
