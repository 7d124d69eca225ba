"""The worker of an engine that can drop parameters: KV in reserved memory, and a pass that may leave it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from kvtransfer.config import ConnectorConfig, transfer_secret
from kvtransfer.relied_on import verify
from workers.coserving import runner_internals as passes
from workers.coserving.worker import CoServingWorker
from workers.overload import vllm_internals as internals
from workers.overload.channel import most_batched_tokens
from workers.overload.config import OverloadConfigError
from workers.overload.cuda_pages import CudaDriver
from workers.overload.membership import DeviceLock, EngineMemory, PeerLine
from workers.overload.memory import LayerWeights, ReservedKv
from workers.overload.pages import PageDriver, PhysicalMemory
from workers.overload.plugin import NAME
from workers.overload.split import SplitModel

logger = logging.getLogger("conserve.workers.overload")


class DroppingWorkerMixin:
    """In front of one of vLLM's worker classes: can share its layers with other engines'."""

    model_runner: Any
    vllm_config: Any
    _split: SplitModel | None = None
    _weights: LayerWeights | None = None
    _kv: ReservedKv | None = None
    _without_result: Any | None = None  # the scheduler output of the iteration whose peer was lost

    def page_driver(self, nbytes: int) -> PageDriver:
        """For so much memory in pages."""
        raise NotImplementedError

    def compiled_in_the_way(self) -> str | None:
        """What of its compiled passes and graphs has all layers in it."""
        raise NotImplementedError

    def load_model(self, **kwargs: Any) -> None:
        verify(internals.WORKING)
        verify(passes.WORKING)
        self._refuse_unsupported()
        with internals.weights_kept():
            super().load_model(**kwargs)  # type: ignore[misc]
        self._device = DeviceLock()
        internals.on_kv_allocated(self.model_runner, self._release_kv, self._in_reserved_memory)
        passes.wrap_forward(self.model_runner, self._through_the_split)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        assert self._kv is not None and self._weights is not None
        config = ConnectorConfig.from_extra_config(
            self.vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        self._split = SplitModel(
            self.model_runner,
            self._kv,
            self._weights,
            int(kv_cache_config.num_blocks),
            self._device,
            PeerLine(config.host, transfer_secret(), config.encrypt),
        )
        internals.connector().worker_side(NAME).split = self._split

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._split is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        self._split.lost = False
        with self._device:
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            if self._split.is_split:
                self._split.settle()
        self._without_result = scheduler_output if self._split.lost else None
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
        wrong = {
            f"max-num-batched-tokens above {most}": config.scheduler_config.max_num_batched_tokens > most,
            "several ranks": config.parallel_config.world_size > 1,
            "quantised weights": config.model_config.quantization is not None,
            "LoRA": config.lora_config is not None,
            "speculative decoding": config.speculative_config is not None,
        }
        named = [what for what, present in wrong.items() if present]
        if compiled := self.compiled_in_the_way():
            named.append(compiled)
        if named:
            raise OverloadConfigError(f"parameters cannot be dropped with {'; '.join(named)}")

    def _release_kv(self) -> None:
        if self._kv is not None:
            self._kv.release()
            self._kv = None
            self._memory.trim()

    def _in_reserved_memory(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """With address space for the rows of the largest group's pools in each layer that is kept.

        Twice where vLLM tries its graphs before it knows how much KV there will be.
        """
        model = internals.decoder_of(self.model_runner)
        internals.verify_attention(self.model_runner)
        if set(model.attention) != set(tensors):
            raise OverloadConfigError("layers of this model share their KV: it is not split")
        blocks = len(next(iter(tensors.values())))
        row = max(tensor[0].nbytes for tensor in tensors.values())
        if self._weights is None:
            parameters = sum(one.nbytes for layer in model.layers for one in layer.parameters())
            self._memory = PhysicalMemory(self.page_driver(len(tensors) * blocks * row + parameters))
            packed = internals.PackedWeights(model.layers)
            self._weights = LayerWeights(model.layers, self._memory, packed)
        sizes = [self._weights.layer_bytes(layer) for layer in range(len(model.layers))]
        there_is = EngineMemory(blocks, row, sizes, self._memory.page_bytes)
        in_order = {name: tensors[name] for name in model.attention}
        self._kv = ReservedKv(in_order, there_is.most_rows(), self._memory)
        return dict(self._kv.views(blocks))

    def _through_the_split(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def here_or_split(
            input_ids: Any,
            positions: Any,
            intermediate_tensors: Any = None,
            inputs_embeds: Any = None,
            **more: Any,
        ) -> Any:
            split, hidden = self._split, None
            if split is None or not (split.is_split or split.lost):
                return forward(
                    input_ids=input_ids,
                    positions=positions,
                    intermediate_tensors=intermediate_tensors,
                    inputs_embeds=inputs_embeds,
                    **more,
                )
            if not split.lost:
                hidden = split.forward(input_ids, positions, inputs_embeds)
            return passes.empty_hidden_states(self.model_runner, positions) if hidden is None else hidden

        return here_or_split


class DroppingOnCuda(DroppingWorkerMixin):
    """With the V1 model runner. While it shares layers its passes are eager; pieces of graphs are good again
    with the whole model, because nothing in it has moved."""

    def page_driver(self, nbytes: int) -> PageDriver:
        return CudaDriver(self.model_runner.device)

    def compiled_in_the_way(self) -> str | None:
        full = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        return "full CUDA graphs (cudagraph_mode: PIECEWISE, or --enforce-eager)" if full else None


class DroppingWorker(DroppingOnCuda, Worker):
    """Without co-serving."""


class CoServingDroppingWorker(DroppingOnCuda, CoServingWorker):
    """Its passes end early at safepoints while it has the whole model."""
