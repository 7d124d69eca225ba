"""Connector that holds the blocks of ended requests for a few steps, like a connector that saves them."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

HELD_STEPS = 3
CONFIG = {
    "kv_connector": "HoldingConnector",
    "kv_connector_module_path": "tests.kvtransfer.simulated.holding",
    "kv_role": "kv_both",
}


class HoldingConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held: dict[str, int] = {}
        self.resets = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return True, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, None

    def reset_cache(self) -> bool:
        self.resets += 1
        return True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._held.update(dict.fromkeys(finished_req_ids, HELD_STEPS))
        self._held = {request: steps - 1 for request, steps in self._held.items()}
        done = {request for request, steps in self._held.items() if not steps}
        self._held = {request: steps for request, steps in self._held.items() if steps}
        return done or None, None
