"""Requests that only bring KV back, ahead of a conversation's turn: nothing is computed for them.

vLLM would compute the last token of a prompt whose KV is all there, and with it the tokens of its last block:
an iteration that reads the whole context once more, which turns that run would wait for. Here such a request
ends with no token as soon as its load has ended, or when there is nothing to load.
"""

from typing import Any

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus

from kvtransfer.shared_state import brings_back


class Restores:
    """Those of one scheduler. `retention`: the plugin that knows of which there is no more."""

    def __init__(self, scheduler: Any, retention: Any) -> None:
        self._scheduler, self._retention = scheduler, retention
        self._waiting: dict[str, Any] = {}

    @property
    def waiting(self) -> list[Any]:
        return list(self._waiting.values())

    def add(self, request: Any) -> None:
        if self._retention is not None and brings_back(request) is not None:
            self._waiting[request.request_id] = request

    def drop(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def end(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """After a step: those that have what there is, into what the step tells clients."""
        arrived = self._scheduler.finished_recving_kv_req_ids
        for request_id, request in list(self._waiting.items()):
            if request_id in arrived or self._retention.is_back(request_id):
                self.drop(request_id)
                told = self._end(request, request_id in arrived)
                outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs.append(told)

    def _end(self, request: Any, loaded: bool) -> EngineCoreOutput:
        stats = request.take_prefill_stats() or PrefillStats()
        if loaded:
            self._scheduler.take_load(request)
            there = request.num_computed_tokens
            local = min(stats.num_local_cached_tokens, there)
        else:
            local = there = self._scheduler.cached_tokens(request)
        stats.set(there, local, there - local)  # the rest of the prompt is neither computed nor found
        if 2 * there < request.num_prompt_tokens:
            self._retention.did_not_come(request.request_id)
        if self._scheduler.log_stats:  # vLLM reckons its times from there
            request.record_event(EngineCoreEventType.SCHEDULED)
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_LENGTH_CAPPED)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            prefill_stats=stats,
            trace_headers=request.trace_headers,
        )
