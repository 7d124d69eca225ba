"""Safepoints work in an engine with a second connector, such as NIXL."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.workers.coserving.model_free import BLOCK, ModelFreeEngine, expected
from workers.engine.coserving import safepoint


class OtherMetadata(KVConnectorMetadata):
    """Metadata without content, which `IdleConnector` sends to its workers."""


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector that has no KV and moves none."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> OtherMetadata:
        return OtherMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


BESIDE = {
    "kv_connector": "IdleConnector",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_both",
    "kv_connector_extra_config": {},
}


def test_iterations_with_offline_work_are_armed_and_rolled_back(small_model: Path) -> None:
    engine = ModelFreeEngine(small_model, beside=BESIDE)
    prompt = list(range(32, 32 + 3 * BLOCK))
    engine.ask("batch", prompt, 4, priority=1)
    engine.step(abort_share=0.0)
    assert engine.scheduler.plugin(safepoint.NAME).armed > 0
    engine.ask("turn", prompt[: 2 * BLOCK], 4, priority=0)
    for _ in range(30):
        engine.step(abort_share=0.5)
    assert engine.aborts > 0
    assert engine.lies == []
    assert engine.outputs == {"batch": expected(prompt, 4), "turn": expected(prompt[: 2 * BLOCK], 4)}


def test_iterations_without_offline_work_are_not_armed(small_model: Path) -> None:
    engine = ModelFreeEngine(small_model, beside=BESIDE)
    engine.ask("turn", [40] * (3 * BLOCK), 2, priority=0)
    engine.step(abort_share=0.0)
    assert engine.scheduler.plugin(safepoint.NAME).armed == 0
