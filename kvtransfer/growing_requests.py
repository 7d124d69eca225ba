"""Finds the requests of a step that may have completed another block since they were last examined."""

from collections.abc import Mapping
from typing import Any

# With asynchronous scheduling, the result of a step is known two steps later. Until then, a step that
# computes prompts may complete several blocks of any request.
UNTIL_CONFIRMED = 2


class GrowingRequests:
    """Finds requests that may have one more full block, so that decoding steps examine few requests.

    A request that decodes completes at most one token a step. It is examined again after as many steps as its
    last block lacks tokens.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._step = 0
        self._all_until = 0
        self._due: dict[int, list[str]] = {}  # step -> requests to look at

    def of_step(self, output: Any, requests: Mapping[str, tuple[Any, ...]]) -> list[str]:
        """Return the requests to examine in this step. Values of `requests` begin with vLLM's object."""
        self._step += 1
        scheduled = output.num_scheduled_tokens
        admitted = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        if admitted or output.total_num_scheduled_tokens != len(scheduled):
            self._all_until = self._step + UNTIL_CONFIRMED
        if self._step <= self._all_until:
            due = [request_id for ids in self._due.values() for request_id in ids]
            found = [request_id for request_id in scheduled if request_id in requests]
            self._due.clear()
        else:
            due = self._due.pop(self._step, [])
            found = [request_id for request_id in due if request_id in scheduled and request_id in requests]
        later = [request_id for request_id in due if request_id not in scheduled and request_id in requests]
        if later:
            self._due.setdefault(self._step + 1, []).extend(later)
        for request_id in found:
            request = requests[request_id][0]
            confirmed = max(request.num_computed_tokens - request.num_in_flight_tokens, 0)
            left = self._block_tokens - confirmed % self._block_tokens
            self._due.setdefault(self._step + left, []).append(request_id)
        return found
