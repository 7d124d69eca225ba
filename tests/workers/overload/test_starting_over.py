"""A real engine that recomputes all requests because KV was lost gives the same answers."""

from collections.abc import Iterator

import pytest

from deploy.small_model import make_model
from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.in_process import EngineHere
from tests.workers.overload.together import requests
from workers.engine.coserving.config import PROMPT_SCHEDULER, WORKER_CLASS
from workers.engine.overload.config import OVERLOAD_PLUGIN

pytestmark = pytest.mark.engine

BLOCKS, OUTPUT = 80, 40


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHere]:
    model = tmp_path_factory.mktemp("model") / "small"
    make_model(model)
    connector = ConnectorConfig(
        engine="d",
        transfer=False,
        layer_hooks=False,
        plugins=(OVERLOAD_PLUGIN,),
        host_kv_gib=0.05,
        park_after_s=600,
    )
    made = EngineHere(
        model,
        connector,
        blocks=BLOCKS,
        scheduler_cls=PROMPT_SCHEDULER,
        worker_cls=WORKER_CLASS,
        max_num_seqs=1,
    )
    yield made
    made.close()


def test_recomputing_all_requests_frees_blocks_of_a_request_that_waits_with_loaded_kv(
    engine: EngineHere,
) -> None:
    """vLLM frees only the blocks of running requests, and raises if a waiting request holds blocks."""
    from workers.engine.compat.block_pool import start_over

    (_, prompt, _), (_, other, _) = requests(5, count=2)
    prompt *= 3
    history = prompt + engine.ask(prompt, 8, session="a")
    turn = history + prompt[:20]
    right = engine.ask(turn, OUTPUT), engine.ask(other, OUTPUT)
    assert engine.connector.kv_state.park("a")
    for _ in range(20):  # copies to the host are made beside steps
        engine.ask(other[:5], 1)
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.evict_blocks(set(range(1, pool.num_gpu_blocks)))  # as if others had taken them
    before = engine.computed
    asked = engine.add(turn, OUTPUT, session="a"), engine.add(other, OUTPUT)
    for _ in range(200):
        engine.step()
        waiting = list(engine.scheduler.kv_holding_waiting)
        if waiting and waiting[0].request_id in engine.connector.kv_state.loads.loaded:
            break
    assert [request.num_tokens for request in waiting] == [len(turn)]
    start_over(engine.scheduler, BLOCKS)
    engine.run()
    assert tuple(engine.answers[name] for name in asked) == right
    assert engine.faults() == []
    assert engine.computed > before
