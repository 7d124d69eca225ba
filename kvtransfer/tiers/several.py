"""Our connector, and beside it another of vLLM's: a shared tier, or NIXL.

vLLM's `MultiConnector` asks them in their order, the first that has a prompt's KV loads it, and all save.
Added here is what it does not do for ours.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvtransfer.config import CONNECTOR, CONNECTOR_MODULE, LMCACHE, LMCACHE_MODULE
from kvtransfer.connector import ConServeConnector
from kvtransfer.parts import SchedulerHalf

# The front end finds the counters of each connector by its name, among those registered in its own process.
for name, module in ((CONNECTOR, CONNECTOR_MODULE), (LMCACHE, LMCACHE_MODULE)):
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


class SeveralConnectors(MultiConnector):
    @property
    def _ours(self) -> ConServeConnector:
        return next(one for one in self._connectors if isinstance(one, ConServeConnector))

    def scheduler_half(self, part: str) -> SchedulerHalf | None:
        return self._ours.scheduler_half(part)

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        held, params = super().request_finished(request, blocks)
        if held:
            self._ours.held_by_others(request.request_id)
        return held, params

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        """Only this engine's KV is void; what a shared tier has is not forgotten for it."""
        return self._ours.reset_cache()
