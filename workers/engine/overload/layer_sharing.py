"""Layer sharing in a worker: memory is in pages, and forward passes also run through other engines."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.platforms import current_platform

from kvtransfer.compat.relied_on import verify
from kvtransfer.config import ConnectorConfig, transfer_secret
from workers.engine.compat import coserving_runner as passes
from workers.engine.compat import split_runner as internals
from workers.engine.forward_ended import ForwardEnded
from workers.engine.overload.config import OverloadConfigError
from workers.engine.overload.pages.cpu_pages import CpuPageDriver
from workers.engine.overload.pages.cuda_pages import CudaPageDriver
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv
from workers.engine.overload.pages.physical_memory import PageDriver, PhysicalMemory
from workers.engine.overload.plugin import NAME
from workers.engine.overload.split.membership import DeviceLock, EngineMemory, PeerSettings
from workers.engine.overload.split.peer_link import most_batched_tokens
from workers.engine.overload.split.split_model import SplitModel


class PeerLost(ForwardEnded):
    """Signal that this iteration lost a member of the split, so that no request's KV is complete."""


class LayerSharing:
    """Worker's part of dropping layers: it moves memory in pages, and runs passes through other engines."""

    def __init__(self, vllm_config: Any) -> None:
        verify(internals.WORKING)
        _refuse_unsupported(vllm_config)
        self._config = vllm_config
        self._device = DeviceLock()
        self._runner: Any = None
        self._model: SplitModel | None = None
        self._weights: LayerWeights | None = None
        self._kv: ReservedKv | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Keep the unpacked weights of a model that is loaded in this context."""
        with internals.weights_kept():
            yield

    def attach(self, runner: Any) -> None:
        """Patch a loaded model's runner: KV is allocated in pages, and passes may use other engines."""
        self._runner = runner
        internals.on_kv_allocated(runner, self._release_kv, self._allocate_in_pages)
        passes.wrap_forward(runner, self._through_group)

    def start(self, blocks: int) -> None:
        """Accept orders and peers, after KV was allocated with `blocks` blocks beside the whole model."""
        assert self._kv is not None and self._weights is not None
        extra = self._config.kv_transfer_config.kv_connector_extra_config
        config = ConnectorConfig.from_extra_config(extra)
        settings = PeerSettings(config.host, transfer_secret(), config.encrypt)
        self._model = SplitModel(self._runner, self._kv, self._weights, blocks, self._device, settings)
        internals.connector().worker_side(NAME).model = self._model

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the device lock during an iteration."""
        if self._model is None:
            yield
            return
        self._model.split.lost = False
        with self._device:
            yield
            if self._model.is_split:
                self._model.split.finish_launched_work()

    def _release_kv(self) -> None:
        if self._kv is not None:
            self._kv.release()
            self._kv.memory.trim()
            self._kv = None

    def _allocate_in_pages(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return KV tensors in pages, with address space for the largest split.

        vLLM calls this twice if it tries CUDA graphs before it knows how much KV there will be.
        """
        model = internals.decoder_of(self._runner)
        internals.verify_attention(self._runner)
        if set(model.attention) != set(tensors):
            raise OverloadConfigError("layers of this model share their KV: it cannot be split")
        if self._weights is None:
            memory = PhysicalMemory(_page_driver(self._runner.device))
            self._weights = LayerWeights(model.layers, memory, internals.PackedWeights(model.layers))
        memory = self._weights.memory
        blocks = len(next(iter(tensors.values())))
        row_bytes = max(tensor[0].nbytes for tensor in tensors.values())
        sizes = [self._weights.layer_bytes(layer) for layer in range(len(model.layers))]
        rows = EngineMemory(blocks, row_bytes, sizes, memory.page_bytes).most_rows()
        self._kv = ReservedKv({name: tensors[name] for name in model.attention}, rows, memory)
        return dict(self._kv.views(blocks))

    def _through_group(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward` so that it runs through all engines of the split while layers are shared."""

        def forward_or_split(**inputs: Any) -> Any:
            model = self._model
            if model is not None and model.is_split:
                embedded = inputs.get("inputs_embeds")
                hidden = model.forward(inputs.get("input_ids"), inputs["positions"], embedded)
                if hidden is not None:
                    return hidden
            if model is not None and model.split.lost:
                raise PeerLost
            return forward(**inputs)

        return forward_or_split


def _page_driver(device: torch.device) -> PageDriver:
    return CpuPageDriver() if device.type == "cpu" else CudaPageDriver(device)


def _refuse_unsupported(config: Any) -> None:
    model = config.model_config
    most = most_batched_tokens(model.get_hidden_size(), model.dtype.itemsize)
    refused = {
        f"max-num-batched-tokens above {most}": config.scheduler_config.max_num_batched_tokens > most,
        "several ranks": config.parallel_config.world_size > 1,
        "quantised weights": model.quantization is not None,
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
    }
    # Passes are eager while layers are shared. Captured CUDA graphs stay valid.
    if current_platform.is_cpu():
        refused["compiled passes (start with --enforce-eager)"] = not model.enforce_eager
    else:
        full_graphs = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        refused["full CUDA graphs (cudagraph_mode: PIECEWISE, or --enforce-eager)"] = full_graphs
    if named := [feature for feature, present in refused.items() if present]:
        raise OverloadConfigError(f"parameters cannot be dropped with {'; '.join(named)}")
