"""Steps with work between layers never run as whole CUDA graphs; all other steps may.

vLLM's scheduler and graph dispatcher run with both sides of our connector. There are no real graphs: a step
with a whole graph just calls no hook.
"""

import logging
import pickle
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvtransfer.config import ConnectorConfig
from kvtransfer.connector import ConServeConnector
from kvtransfer.plugins import Plugin, WorkerSide
from kvtransfer.transfer.scheduler import Fetch, Opened, TransferOrder
from kvtransfer.transfer.worker import TransferWorker
from tests.kvtransfer.engine.engines import free_port
from tests.kvtransfer.simulated import holding
from tests.kvtransfer.simulated.engine import SteppedEngine
from workers.engine.coserving.config import SAFEPOINT_PLUGIN
from workers.engine.coserving.safepoint import Armed, Flag, SafepointWorker

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
BATCHED = 64
Make = Callable[..., SteppedEngine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setattr(CudagraphDispatcher, "dispatch", CudagraphDispatcher.dispatch)  # undone at the end
    made: list[SteppedEngine] = []

    def engine(config: ConnectorConfig, **more: object) -> SteppedEngine:
        made.append(SteppedEngine(config, batched_tokens=BATCHED, graphs=True, **more))  # type: ignore[arg-type]
        return made[-1]

    yield engine
    for one in made:
        one.close()


def coserving(**more: object) -> ConnectorConfig:
    flag = f"conserve-test-{uuid.uuid4().hex[:8]}"
    return ConnectorConfig(transfer=False, safepoint=flag, plugins=(SAFEPOINT_PLUGIN,), **more)  # type: ignore[arg-type]


def prefiller() -> ConnectorConfig:
    return ConnectorConfig(engine="p", epoch=1, port=free_port())


def arms(engine: SteppedEngine, seconds: float) -> None:
    """Arm the coming steps with this predicted duration; if it is 0, arm none."""
    side = engine.scheduler.plugin("safepoint")
    if side is not None:
        side.worth_arming = lambda: seconds


EXPORT = {"do_remote_decode": True, "transfer_id": "t"}


@pytest.mark.parametrize("beside", [None, holding.CONFIG], ids=["alone", "beside another connector"])
def test_only_armed_steps_use_piecewise_graphs(make: Make, beside: object) -> None:
    engine = make(coserving(), beside=beside)
    engine.add("online", [1] * 5, 12)
    for _ in range(3):
        engine.step()
    assert engine.modes == [PIECEWISE, FULL, FULL], "a prompt's step has piecewise graphs by itself"
    engine.add("offline", [2] * 5, 4, priority=10)
    arms(engine, 0.1)
    for _ in range(2):
        engine.step()
    assert engine.modes[3:] == [PIECEWISE] * 2, "of which one is of decodes alone"
    arms(engine, 0.0)
    for _ in range(2):
        engine.step()
    assert "offline" in engine.answers and engine.modes[5:] == [FULL] * 2
    assert engine.wrong == []


def test_an_exporting_step_never_uses_a_whole_graph_and_the_decoder_gets_correct_kv(make: Make) -> None:
    source, target = prefiller(), ConnectorConfig(engine="d", layer_hooks=False)
    first, second = make(source), make(target)
    first.add("other", [3] * 5, 12)
    for _ in range(2):
        first.step()
    assert first.modes == [PIECEWISE, FULL]
    # The other request takes a token of each step, so the last step has one token of each request.
    prompt = [n % 250 for n in range(2 * BATCHED - 1)]
    first.add("leg", prompt, 1, params=EXPORT)
    for _ in range(3):
        first.step()
    assert first.modes[2:] == [CUDAGraphMode.NONE] * 2 + [PIECEWISE]
    first.step()
    assert first.modes[-1] == FULL, "the other goes on"
    fetch = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_host": source.host,
        "remote_port": source.port,
        "remote_epoch": 1,
    }
    second.add("leg", prompt, 3, params=fetch)
    second.run()
    assert second.wrong == [] and second.computed_prompt_tokens <= 1
    assert set(second.modes) == {FULL}, "nothing of a decoder's acts between layers"


def test_between_steps_vllm_may_dispatch_whole_graphs(make: Make) -> None:
    """vLLM dispatches graphs between steps when it captures them, and on idle data-parallel ranks."""
    engine = make(coserving())
    engine.add("offline", [2] * 5, 3, priority=10)
    arms(engine, 0.1)
    engine.step()
    for uniform, mode in ((True, FULL), (False, PIECEWISE)):
        for valid in (None, {mode}):
            found, _ = engine.dispatcher.dispatch(4, uniform_decode=uniform, valid_modes=valid)
            assert found == mode


def test_a_graph_mode_that_another_connector_forbids_stays_forbidden(make: Make) -> None:
    engine = make(coserving())
    found, _ = engine.dispatcher.dispatch(4, uniform_decode=True, invalid_modes={FULL})
    assert found == PIECEWISE
    engine.add("offline", [2] * 5, 3, priority=10)
    arms(engine, 0.1)
    engine.worker.handle_preemptions(engine.scheduler.schedule().kv_connector_metadata)
    found, _ = engine.dispatcher.dispatch(4, uniform_decode=True, invalid_modes={PIECEWISE})
    assert found == CUDAGraphMode.NONE


@pytest.mark.parametrize("config", [coserving, prefiller], ids=["armed", "exporting"])
def test_a_step_whose_graph_would_skip_the_hooks_runs_without_graphs(
    config: Callable[[], ConnectorConfig],
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unpatched = CudagraphDispatcher.dispatch
    engine = make(config())
    monkeypatch.setattr(CudagraphDispatcher, "dispatch", unpatched)
    engine.add("other", [1] * 5, 3)
    engine.run()
    assert engine.modes == [PIECEWISE, FULL, FULL]
    engine.add("one token", [1], 3, priority=10, params=EXPORT)
    arms(engine, 0.1)
    with caplog.at_level(logging.ERROR, "conserve.kvtransfer"):
        engine.run()
    taken_back = engine.modes[3:].count(CUDAGraphMode.NONE)
    assert taken_back >= 1 and engine.modes[3] == CUDAGraphMode.NONE
    assert engine.wrong == [] and "one token" in engine.answers
    stats = engine.worker.get_kv_connector_stats()
    assert stats is not None and stats.data["graphs_taken_back"] == taken_back
    assert "vLLM chose a whole CUDA graph" in caplog.text


def test_a_step_without_a_forward_context_counts_as_a_wrong_graph_choice(make: Make) -> None:
    engine = make(coserving())
    engine.add("offline", [2] * 5, 3, priority=10)
    arms(engine, 0.1)
    meta = engine.scheduler.schedule().kv_connector_metadata
    engine.worker.handle_preemptions(meta)
    engine.worker.bind_connector_metadata(meta)
    stats = engine.worker.get_kv_connector_stats()
    assert stats is not None and stats.data["graphs_taken_back"] == 1


class SilentWorker(WorkerSide):
    def after_layer(self, layer: str) -> None:
        """Do nothing. A plugin with this hook, but no `needs_layers` of its own, needs hooks in all steps."""


class SilentPlugin(Plugin):
    name = "silent"
    worker = SilentWorker


def test_all_steps_use_piecewise_graphs_for_a_plugin_that_names_no_steps(make: Make) -> None:
    engine = make(ConnectorConfig(transfer=False, plugins=(f"{__name__}:SilentPlugin",)))
    engine.add("turn", [1] * 5, 4)
    engine.run()
    assert engine.modes == [PIECEWISE] * 4


def test_every_rank_chooses_the_same_graphs() -> None:
    flag = Flag(f"conserve-test-{uuid.uuid4().hex[:8]}")
    ranks = [SafepointWorker(flag, 1, rank, 2, 2) for rank in range(2)]
    for order in (Armed(7), None, Armed(8)):
        ranks[0].before_step(order)  # the other rank is a step behind
        sent = pickle.loads(pickle.dumps(order))
        assert [rank.needs_layers(sent) for rank in ranks] == [order is not None] * 2
    flag.remove()


def test_only_exported_prefills_need_layer_hooks(make: Make) -> None:
    engine = make(prefiller())
    side = engine.worker.worker_side("transfer")
    assert isinstance(side, TransferWorker)
    without = TransferOrder(
        opened=[Opened("t", [[1]], 32, "p")], finished=["u"], voided=["v"], extended=[("t", [[2]])]
    )
    without.fetches.append(Fetch("r", None, [0], [[3]]))  # type: ignore[arg-type]
    assert not side.needs_layers(None) and not side.needs_layers(without)
    assert side.needs_layers(TransferOrder(progress=[("t", 32)]))


# What the engine does if graphs cannot be chosen step by step.


def extra(config: ConnectorConfig) -> dict[str, object]:
    return config.to_kv_transfer_config()["kv_connector_extra_config"]


@pytest.mark.parametrize(("said", "needed"), [("0", False), ("1", True), (None, True)])
def test_piecewise_graphs_are_requested_unless_the_v1_runner_is_selected(
    said: str | None, needed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if said is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", said)
    with caplog.at_level(logging.WARNING, "conserve.kvtransfer"):
        assert ConServeConnector.requires_piecewise_for_cudagraph(extra(coserving())) is needed
    assert ("set VLLM_USE_V2_MODEL_RUNNER=0" in caplog.text) is needed
    without = ConnectorConfig(layer_hooks=False)
    assert not ConServeConnector.requires_piecewise_for_cudagraph(extra(without))


def changed(self: object, num_tokens: int, forbidden: object = None) -> None:
    """Stand in for the dispatch method of another vLLM release, which has other parameters."""


def chosen_elsewhere(self: Any, orders: Any) -> None:
    """Stand in for a runner that chooses graphs in another way than ours."""
    self.handle_preemptions(orders)


def again(engine: SteppedEngine) -> ConServeConnector:
    """Return a second worker-side connector, made for the same engine after a change of vLLM."""
    made: ConServeConnector = type(engine.worker)(
        engine.vllm_config, engine.worker.role, engine.scheduler.kv_cache_config
    )
    return made


class FlashInfer:
    """Attention backend with the name FLASHINFER, and nothing else."""

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"


DISPATCHER = "dispatch(self, num_tokens, uniform_decode, has_lora, num_active_loras, valid_modes"
RUNNER = "GPUModelRunner.execute_model is relied on to use _determine_batch_execution_and_padding"


@pytest.mark.parametrize("said", [DISPATCHER, RUNNER, "V2 model runner", "FlashInfer"])
def test_all_steps_use_piecewise_graphs_if_they_cannot_be_chosen_per_step(
    said: str, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(coserving())
    if said == DISPATCHER:
        monkeypatch.setattr(CudagraphDispatcher, "dispatch", changed)
    elif said == RUNNER:
        monkeypatch.setattr(GPUModelRunner, "execute_model", chosen_elsewhere)
    elif said == "FlashInfer":
        layers = engine.vllm_config.compilation_config.static_forward_context
        monkeypatch.setitem(layers, "model.layers.0.self_attn", SimpleNamespace(get_attn_backend=FlashInfer))
    else:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")  # unset: vLLM may choose the V2 runner
    with caplog.at_level(logging.WARNING, "conserve.kvtransfer"):
        connector = again(engine)
    assert engine.vllm_config.compilation_config.cudagraph_mode == PIECEWISE
    assert "piecewise CUDA graphs for all steps" in caplog.text and said in caplog.text
    stats = connector.get_kv_connector_stats()
    assert stats is not None and stats.data["piecewise_only"] == 1
    engine.add("offline", [2] * 5, 3, priority=10)
    connector.handle_preemptions(meta := engine.scheduler.schedule().kv_connector_metadata)
    connector.bind_connector_metadata(meta)  # no context, as on V2: there are no whole graphs to refuse
    assert connector.get_kv_connector_stats() is None, "it is counted once"
    connector.shutdown()


def test_steps_run_without_graphs_if_there_are_no_piecewise_graphs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(coserving())
    monkeypatch.setattr(CudagraphDispatcher, "dispatch", changed)
    compilation = engine.vllm_config.compilation_config
    compilation.cudagraph_mode, compilation.splitting_ops = FULL, []
    again(engine).shutdown()
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize("hooks", [True, False])
def test_vllm_is_not_patched_if_there_are_no_graphs_or_no_hooks(
    hooks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpatched(self: object) -> None:
        """Stand in for an unpatched method."""

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setattr(CudagraphDispatcher, "dispatch", unpatched)
    config = coserving() if hooks else ConnectorConfig(engine="d", layer_hooks=False)
    engine = SteppedEngine(config, graphs=not hooks)
    assert CudagraphDispatcher.dispatch is unpatched
    engine.close()
