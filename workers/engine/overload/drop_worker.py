"""vLLM worker with parameters and KV in pages, and with a forward pass that may go through other engines."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from kvtransfer.compat.relied_on import verify
from kvtransfer.config import ConnectorConfig, transfer_secret
from workers.engine.compat import coserving_runner as passes
from workers.engine.compat import parameter_drop as internals
from workers.engine.coserving.worker import CoServingWorker
from workers.engine.overload.config import OverloadConfigError
from workers.engine.overload.pages.cuda_pages import CudaPageDriver
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv
from workers.engine.overload.pages.physical_memory import PageDriver, PhysicalMemory
from workers.engine.overload.plugin import NAME
from workers.engine.overload.split.membership import DeviceLock, EngineMemory, PeerSettings
from workers.engine.overload.split.peer_link import most_batched_tokens
from workers.engine.overload.split.split_model import SplitModel


class DroppingWorkerMixin:
    """Mixin for one of vLLM's worker classes, of an engine that can drop layers."""

    model_runner: Any
    vllm_config: Any
    _model: SplitModel | None = None
    _weights: LayerWeights | None = None
    _kv: ReservedKv | None = None
    _without_result: Any | None = None  # the scheduler output of the iteration in which a peer was lost

    def page_driver(self) -> PageDriver:
        """Return the page driver of this worker's device."""
        raise NotImplementedError

    def unsupported_compilation(self) -> str | None:
        """Return what in this engine's compiled passes or graphs spans all layers, if anything."""
        raise NotImplementedError

    def load_model(self, **kwargs: Any) -> None:
        verify(internals.WORKING)
        verify(passes.WORKING)
        self._refuse_unsupported()
        with internals.weights_kept():
            super().load_model(**kwargs)  # type: ignore[misc]
        self._device = DeviceLock()
        internals.on_kv_allocated(self.model_runner, self._release_kv, self._allocate_in_pages)
        passes.wrap_forward(self.model_runner, self._wrap)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        assert self._kv is not None and self._weights is not None
        extra = self.vllm_config.kv_transfer_config.kv_connector_extra_config
        config = ConnectorConfig.from_extra_config(extra)
        self._model = SplitModel(
            self.model_runner,
            self._kv,
            self._weights,
            int(kv_cache_config.num_blocks),
            self._device,
            PeerSettings(config.host, transfer_secret(), config.encrypt),
        )
        internals.connector().worker_side(NAME).model = self._model

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._model is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        split = self._model.split
        split.lost = False
        with self._device:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            if self._model.is_split:
                split.finish_launched_work()
        self._without_result = scheduler_output if split.lost else None
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        lost, self._without_result = self._without_result, None
        if lost is not None:
            return passes.nothing_sampled(self.model_runner, lost)
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def _refuse_unsupported(self) -> None:
        config = self.vllm_config
        model = config.model_config
        most = most_batched_tokens(model.get_hidden_size(), model.dtype.itemsize)
        refused = {
            f"max-num-batched-tokens above {most}": config.scheduler_config.max_num_batched_tokens > most,
            "several ranks": config.parallel_config.world_size > 1,
            "quantised weights": model.quantization is not None,
            "LoRA": config.lora_config is not None,
            "speculative decoding": config.speculative_config is not None,
        }
        named = [feature for feature, present in refused.items() if present]
        if compiled := self.unsupported_compilation():
            named.append(compiled)
        if named:
            raise OverloadConfigError(f"parameters cannot be dropped with {'; '.join(named)}")

    def _release_kv(self) -> None:
        if self._kv is not None:
            self._kv.release()
            self._kv.memory.trim()
            self._kv = None

    def _allocate_in_pages(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return KV tensors in pages, with address space for the largest split.

        vLLM allocates twice if it tries graphs before it knows how much KV there will be.
        """
        model = internals.decoder_of(self.model_runner)
        internals.verify_attention(self.model_runner)
        if set(model.attention) != set(tensors):
            raise OverloadConfigError("layers of this model share their KV: it cannot be split")
        if self._weights is None:
            packed = internals.PackedWeights(model.layers)
            self._weights = LayerWeights(model.layers, PhysicalMemory(self.page_driver()), packed)
        blocks = len(next(iter(tensors.values())))
        row_bytes = max(tensor[0].nbytes for tensor in tensors.values())
        sizes = [self._weights.layer_bytes(layer) for layer in range(len(model.layers))]
        memory = self._weights.memory
        rows = EngineMemory(blocks, row_bytes, sizes, memory.page_bytes).most_rows()
        self._kv = ReservedKv({name: tensors[name] for name in model.attention}, rows, memory)
        return dict(self._kv.views(blocks))

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the model's forward pass: through the group while this engine is split."""

        def forward_or_split(
            input_ids: Any,
            positions: Any,
            intermediate_tensors: Any = None,
            inputs_embeds: Any = None,
            **more: Any,
        ) -> Any:
            model, hidden = self._model, None
            if model is None or not (model.is_split or model.split.lost):
                return forward(
                    input_ids=input_ids,
                    positions=positions,
                    intermediate_tensors=intermediate_tensors,
                    inputs_embeds=inputs_embeds,
                    **more,
                )
            if not model.split.lost:
                hidden = model.forward(input_ids, positions, inputs_embeds)
            return passes.empty_hidden_states(self.model_runner, positions) if hidden is None else hidden

        return forward_or_split


class DroppingOnCuda(DroppingWorkerMixin):
    """Part for GPUs. Passes are eager while layers are shared; captured pieces of graphs stay valid."""

    def page_driver(self) -> PageDriver:
        return CudaPageDriver(self.model_runner.device)

    def unsupported_compilation(self) -> str | None:
        full = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        return "full CUDA graphs (cudagraph_mode: PIECEWISE, or --enforce-eager)" if full else None


class DroppingWorker(DroppingOnCuda, Worker):
    """Worker on a GPU without co-serving."""


class CoServingDroppingWorker(DroppingOnCuda, CoServingWorker):
    """Worker on a GPU with co-serving; its passes stop at safepoints only with the whole model."""
