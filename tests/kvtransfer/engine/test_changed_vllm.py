"""An engine does not start on a changed vLLM and reports the difference, with and without co-serving."""

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.config import ConnectorConfig
from tests.kvtransfer.engine.engines import EngineProcess, running

CHANGED = "tests.kvtransfer.engine.changed_vllm"
WHAT_TO_DO = r"in this vLLM \(0\.32\.0.*\): install vllm==0\.32\.0"


def start(*arguments: str) -> None:
    with running(EngineProcess(blocks=64, arguments=arguments)):
        raise AssertionError("the engine serves")


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_an_engine_with_our_connector_refuses_a_changed_vllm() -> None:
    config = ConnectorConfig(transfer=False).to_kv_transfer_config()
    config |= {"kv_connector": "ConnectorOnChangedVllm", "kv_connector_module_path": CHANGED}
    sentence = r"BlockPool\.touch\(self, blocks\) is relied on, but has the parameters \(self, block_ids\) "
    with pytest.raises(RuntimeError, match=sentence + WHAT_TO_DO):
        start("--kv-transfer-config", json.dumps(config))


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_co_serving_engine_refuses_a_changed_vllm() -> None:
    sentence = r"preprocess_add_request\(self, request\) is relied on, but has .* \(self, client_request\) "
    with pytest.raises(RuntimeError, match=sentence + WHAT_TO_DO):
        start("--scheduler-cls", f"{CHANGED}.SchedulerOnChangedVllm", "--scheduling-policy", "priority")
