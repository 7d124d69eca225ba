"""KV is sent after the step if vLLM calls no connector between layers. An aborted step sends none."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")
import torch

from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from kvtransfer.plugins import EngineContext
from kvtransfer.retention.parking import SharedKvState
from kvtransfer.retention.retained_conversations import CacheGroup
from kvtransfer.transfer.kv_memory import HostBlockMemory
from kvtransfer.transfer.peers import Cancellation, TransferEnd, TransferSource, fetch
from kvtransfer.transfer.scheduler import Opened, TransferOrder
from kvtransfer.transfer.wire import TransferRefused
from kvtransfer.transfer.worker import TransferWorker
from tests.kvtransfer.engine.engines import SECRET, free_port

BLOCKS, LAYERS = 8, ("a", "b")


@pytest.mark.parametrize("hooked", [False, True], ids=["without hooks", "aborted between layers"])
def test_blocks_are_sent_after_the_step_that_computed_them(
    hooked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1), cache_config=SimpleNamespace(block_size=4)
    )
    config = ConnectorConfig(port=free_port(), timeout_s=0.5)
    kv_state = SharedKvState(config, 0, time.monotonic)
    kv_config, groups = SimpleNamespace(num_blocks=BLOCKS), (CacheGroup(LAYERS, 4, 64),)
    worker = TransferWorker(EngineContext(config, vllm_config, kv_config, kv_state, groups), 0)
    theirs, mine = ({layer: torch.randn(BLOCKS, 4, 2) for layer in LAYERS} for _ in range(2))
    worker.register(theirs)
    worker.before_step(TransferOrder(opened=[Opened("t", [[3, 5]], 8, "p")], progress=[("t", 8)]))
    if hooked:
        worker.before_layer("a")
    worker.after_step()
    source = TransferSource("127.0.0.1", config.port, "t", config.epoch, "p")
    end = TransferEnd(0, 0, 1, 2.0, SECRET.encode())
    try:
        if hooked:
            with pytest.raises(TransferRefused, match="stalled"):
                fetch(source, [0], [[1, 2]], HostBlockMemory(mine, BLOCKS), end, Cancellation())
        else:
            fetch(source, [0], [[1, 2]], HostBlockMemory(mine, BLOCKS), end, Cancellation())
            assert all(torch.equal(mine[layer][1:3], theirs[layer][[3, 5]]) for layer in LAYERS)
    finally:
        worker.shutdown()
