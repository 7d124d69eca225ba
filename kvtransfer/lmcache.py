"""LMCache's connector, modified to survive the loss of its server.

LMCache 0.5.6 continues without its server after a missed heartbeat. Until that heartbeat, calls to the server
raise time-outs within the step, which ends the engine. Here the first time-out counts as a missed heartbeat:
the load fails, and the engine computes the prompt.
"""

import logging
from typing import Any

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

from kvtransfer.compat.kv_connector import lmcache_is_gone, verify_lmcache

logger = logging.getLogger("conserve.kvtransfer.lmcache")


class GuardedLMCache(LMCacheMPConnector):  # type: ignore[misc]
    """LMCache's connector, changed so that its time-outs do not end the engine."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        verify_lmcache()
        super().__init__(vllm_config, role, kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        try:
            super().start_load_kv(forward_context, **kwargs)
        except TimeoutError as error:
            self._go_on_without(error)
            super().start_load_kv(forward_context, **kwargs)  # marks each load as failed

    def wait_for_save(self) -> None:
        try:
            super().wait_for_save()
        except TimeoutError as error:
            self._go_on_without(error)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        try:
            return super().get_finished(finished_req_ids)  # type: ignore[no-any-return]
        except TimeoutError as error:
            self._go_on_without(error)
            return super().get_finished(finished_req_ids)  # type: ignore[no-any-return]

    def _go_on_without(self, error: TimeoutError) -> None:
        """Stop using the server until a heartbeat finds it again."""
        logger.warning("LMCache does not answer, going on without it: %s", error)
        lmcache_is_gone(self.worker_adapter)
