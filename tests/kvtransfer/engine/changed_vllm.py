"""Connector and scheduler that change one signature of vLLM before they start. Engines load them by name."""

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core import EngineCore

from kvtransfer.connector import ConServeConnector
from workers.engine.coserving.scheduler import CoServingScheduler


def _touch(self: BlockPool, block_ids: list[int]) -> None:
    raise AssertionError("an engine on a changed vLLM has served")


def _preprocess(self: EngineCore, client_request: Any) -> Any:
    raise AssertionError("an engine on a changed vLLM has served")


class ConnectorOnChangedVllm(ConServeConnector):
    """Patch vLLM where the engine creates its connector, because its front end loads this module too."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        BlockPool.touch = _touch
        super().__init__(vllm_config, role, kv_cache_config)


class SchedulerOnChangedVllm(CoServingScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        EngineCore.preprocess_add_request = _preprocess
        super().__init__(*args, **kwargs)
