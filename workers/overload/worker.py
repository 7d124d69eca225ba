"""The worker of an engine that can drop parameters: KV in reserved memory, and a pass that may leave it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvtransfer.config import ConnectorConfig, transfer_secret
from kvtransfer.relied_on import verify
from workers.coserving import vllm_internals as passes
from workers.cpu_worker import SeedSafeCpuWorker
from workers.overload import vllm_internals as internals
from workers.overload.errors import OverloadConfigError
from workers.overload.membership import DeviceLock, PeerLine, most_rows
from workers.overload.memory import LayerWeights, ReservedKv
from workers.overload.plugin import NAME
from workers.overload.split import SplitModel

logger = logging.getLogger("conserve.workers.overload")


class DroppingCpuWorker(SeedSafeCpuWorker):
    """Can share its layers with another engine's."""

    _split: SplitModel | None = None
    _without_result: Any | None = None  # the scheduler output of the iteration whose peer was lost

    def load_model(self, **kwargs: Any) -> None:
        verify(internals.WORKING)
        self._refuse_unsupported()
        with internals.weights_as_they_are():
            super().load_model(**kwargs)
        self._device = DeviceLock()
        self._kv: ReservedKv
        internals.on_kv_allocated(self.model_runner, self._in_reserved_memory)
        passes.wrap_forward(self.model_runner, self._through_the_split)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
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
            return super().execute_model(scheduler_output)
        self._split.lost = False
        with self._device:
            output = super().execute_model(scheduler_output)
        self._without_result = scheduler_output if self._split.lost else None
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        lost, self._without_result = self._without_result, None
        if lost is not None:
            return passes.nothing_sampled(self.model_runner, lost)
        return super().sample_tokens(grammar_output)

    def _refuse_unsupported(self) -> None:
        config = self.vllm_config
        wrong = {
            "compiled passes (start with --enforce-eager)": not config.model_config.enforce_eager,
            "several ranks": config.parallel_config.world_size > 1,
            "quantised weights": config.model_config.quantization is not None,
            "LoRA": config.lora_config is not None,
            "speculative decoding": config.speculative_config is not None,
        }
        if named := [what for what, present in wrong.items() if present]:
            raise OverloadConfigError(f"parameters cannot be dropped with {'; '.join(named)}")

    def _in_reserved_memory(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """With address space for the rows of the largest group's pools in each layer that is kept."""
        model = internals.decoder_of(self.model_runner)
        if set(model.attention) != set(tensors):
            raise OverloadConfigError("layers of this model share their KV: it is not split")
        self._weights = LayerWeights(model.layers)
        blocks = len(next(iter(tensors.values())))
        row = max(tensor[0].nbytes for tensor in tensors.values())
        sizes = [self._weights.layer_bytes(layer) for layer in range(len(model.layers))]
        in_order = {name: tensors[name] for name in model.attention}
        self._kv = ReservedKv(in_order, most_rows(blocks, sizes, row))
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
