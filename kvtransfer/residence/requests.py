"""What a vLLM request says about whose blocks it fills, and which of them are certain."""

from typing import Any


def is_offline(request: Any) -> bool:
    return bool(request.priority > 0)


def owner_key(request: Any) -> str | None:
    """Whose blocks these are. A prefill leg's are nobody's here: the conversation lives on its decoder."""
    if is_offline(request):
        return f"offline:{request.request_id}"
    if (request.kv_transfer_params or {}).get("do_remote_decode"):
        return None
    return str(request.session_id) if request.session_id else None


def confirmed_blocks(request: Any, block_tokens: int) -> int:
    """Full blocks whose KV is certainly there; a step under way may still be rolled back.

    Not for a request whose background load runs: vLLM counts what is on its way as computed.
    """
    confirmed = request.num_computed_tokens - request.num_in_flight_tokens
    return int(min(max(confirmed, 0) // block_tokens, len(request.block_hashes)))


def admitted_now(scheduler_output: Any) -> set[str]:
    """Requests that entered the batch with this step.

    Their prefix hits may be blocks that another request of this very step has yet to compute: vLLM registers
    blocks before they are computed. From the next step on they are confirmed, or rolled back.
    """
    new = {str(request.req_id) for request in scheduler_output.scheduled_new_reqs}
    return new.union(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
