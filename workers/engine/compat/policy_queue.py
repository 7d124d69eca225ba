"""Queue of waiting requests in a policy's order; `coserving_scheduler.py` lists the vLLM names it uses."""

from collections import deque
from collections.abc import Iterable

from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.request import Request


class PolicyQueue(PriorityRequestQueue):
    """vLLM's queue of waiting requests, in which a policy names the requests that come first.

    Online requests that the policy does not name come even before the named ones: they wait for KV or a
    grammar, so that vLLM skips them. Offline requests that it does not name come last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._online: deque[Request] = deque()
        self._offline: deque[Request] = deque()

    def name_online(self, requests: Iterable[Request]) -> None:
        named = list(requests)
        known = {request.request_id for request in named}
        rest = sorted(r for r in self._heap if r.priority <= 0 and r.request_id not in known)
        self._online = deque([*rest, *named])

    def name_offline(self, requests: Iterable[Request]) -> None:
        self._offline = deque(requests)

    def peek_request(self) -> Request:
        head = super().peek_request()
        named = self._offline if head.priority > 0 else self._online
        while named and named[0] not in self._heap:  # ended, or started
            named.popleft()
        return named[0] if named else head

    def pop_request(self) -> Request:
        first = self.peek_request()
        if first is self._heap[0]:
            return super().pop_request()
        self.remove_request(first)
        return first
