"""The models in `SPLIT_MODELS` have the expected forward pass in the installed vLLM."""

import inspect
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.worker.gpu_worker import Worker

from kvtransfer.compat.relied_on import UnsupportedVllmError
from workers.engine.compat import split_runner as internals
from workers.engine.engine_worker import EngineWorker
from workers.engine.overload.config import OVERLOAD_PLUGIN, SPLIT_MODELS, OverloadConfigError


def modules_of(architecture: str) -> list[ModuleType]:
    """Return the modules of an architecture's class and of its bases."""
    classes = ModelRegistry.models[architecture].load_model_cls().__mro__
    return [sys.modules[one.__module__] for one in classes if one.__name__.endswith("ForCausalLM")]


def named(modules: list[ModuleType], ending: str) -> type:
    """Return the first class whose lower-case name is its module's name followed by `ending`."""
    prefixes = [module.__name__.rpartition(".")[2] for module in modules]
    found = (
        one
        for module, prefix in zip(modules, prefixes, strict=True)
        for name, one in vars(module).items()
        if name.lower() == f"{prefix}{ending}"
    )
    kind = next(found)
    assert isinstance(kind, type)
    return kind


@pytest.mark.parametrize("architecture", SPLIT_MODELS)
def test_every_listed_model_has_the_forward_pass_that_layer_sharing_needs(architecture: str) -> None:
    modules = modules_of(architecture)
    layer, model = named(modules, "decoderlayer"), named(modules, "model")
    assert list(inspect.signature(layer.forward).parameters) == [  # type: ignore[attr-defined]
        "self",
        "positions",
        "hidden_states",
        "residual",
    ]
    source = "".join(inspect.getsource(model.forward).split())  # type: ignore[attr-defined]
    assert "hidden_states=self.embed_input_ids(input_ids)residual=None" in source
    assert "hidden_states,residual=layer(positions,hidden_states,residual" in source
    assert "hidden_states,_=self.norm(hidden_states,residual)" in source
    set_to = re.findall(r"(?<!_)hidden_states=", source)
    assert len(set_to) == 3  # set in three places: given embeddings, embedded tokens, an earlier rank


def test_an_engine_of_an_unlisted_model_is_refused() -> None:
    class MixtralForCausalLM:
        model = SimpleNamespace()

    runner = SimpleNamespace(get_model=MixtralForCausalLM)
    with pytest.raises(OverloadConfigError, match="and this one is MixtralForCausalLM"):
        internals.decoder_of(runner)


@pytest.mark.parametrize("method", ["load_model", "execute_model", "sample_tokens", "initialize_from_config"])
def test_a_vllm_worker_whose_methods_have_other_parameters_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = SimpleNamespace(kv_connector_extra_config={"plugins": [OVERLOAD_PLUGIN]})
    worker: Any = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=connector))
    monkeypatch.setattr(Worker, method, lambda self, something_else: None)
    with pytest.raises(UnsupportedVllmError, match=rf"Worker\.{method}.* is relied on, .*something_else"):
        EngineWorker.load_model(worker)
