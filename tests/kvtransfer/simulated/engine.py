"""vLLM's real scheduler and both sides of our connector around a model that detects wrong KV.

The KV that the model writes for a token is a number made of the layer and of all tokens up to it. Before it
samples, the model reads the KV of its whole context, as attention would, and records every wrong number. A
layer with a state reads the state of the previous token and writes that of the last token. There are no
weights and no processes, but blocks, preemptions and transfers as in a real engine.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config.compilation import CompilationMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtransfer.config import SECRET_VARIABLE, SEVERAL, SEVERAL_MODULE, ConnectorConfig
from kvtransfer.connector import ConServeConnector
from kvtransfer.connector_stats import ConnectorStats
from kvtransfer.control.control_socket import EngineCommand
from kvtransfer.retention.parking import SharedKvState
from tests.kvtransfer.engine.engines import model_directory
from workers.engine.coserving.prompt_scheduler import prompt_scheduler

BLOCK_TOKENS = 32
LAYERS = ("layer0", "layer1")
WINDOWED = ("windowed0", "windowed1")
STATES = ("state0", "state1")
WORD = (1 << 62) - 1
VOCABULARY = 250


def history(tokens: list[int]) -> list[int]:
    """Return, for each position, a number that identifies all tokens up to it."""
    numbers, number = [], 0
    for token in tokens:
        number = (number * 6364136223846793005 + token + 1442695040888963407) & WORD
        numbers.append(number)
    return numbers


def next_token(tokens: list[int]) -> int:
    return history(tokens)[-1] % VOCABULARY


def with_graphs(config: VllmConfig, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> None:
    """Give a configuration the CUDA graph settings that vLLM chooses on a GPU."""
    compilation = config.compilation_config
    compilation.mode, compilation.cudagraph_mode = CompilationMode.VLLM_COMPILE, mode
    compilation.splitting_ops = None
    compilation.set_splitting_ops_for_v1(config.parallel_config.all2all_backend)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [1, 2, 4, 8, 16], 16


Row = tuple[list[torch.Tensor], torch.Tensor, int]  # slots by group, what they must hold, first new token


@dataclass
class SteppedEngine:
    connector: ConnectorConfig
    beside: Mapping[str, Any] | None = None  # another connector, as vLLM's configuration names it
    blocks: int = 60
    context: int = 0  # longest request in tokens; 0: as long as the pool
    batched_tokens: int = 256
    window: int = 0  # tokens that a second group of layers attends to; 0: there is none
    states: bool = False  # whether a second group of layers keeps a state
    inner_states: bool = False  # states are also kept within a step, at a block's end, as in vLLM's Mamba 2
    graphs: bool = (
        False  # steps have the CUDA graphs that vLLM's dispatcher gives them; whole ones call no hook
    )
    modes: list[CUDAGraphMode] = field(default_factory=list)  # graphs of each step that has tokens
    wrong: list[str] = field(default_factory=list)
    computed_prompt_tokens: int = 0
    answers: dict[str, list[int]] = field(default_factory=dict)  # of finished requests

    def __post_init__(self) -> None:
        os.environ.setdefault(SECRET_VARIABLE, "a secret only for these tests")
        self.vllm_config = EngineArgs(
            model=str(model_directory()),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=self.context or (self.blocks - 2) * BLOCK_TOKENS,
            max_num_batched_tokens=self.batched_tokens,
            max_num_seqs=8,
            enable_prefix_caching=True,
            scheduling_policy="priority",
            async_scheduling=False,
            enforce_eager=True,
            kv_transfer_config=self._kv_transfer_config(),
        ).create_engine_config()
        self.vllm_config.cache_config.num_gpu_blocks = self.blocks
        self.counts: Counter[str] = Counter()  # of the scheduler side, for `/metrics`
        if self.graphs:
            with_graphs(self.vllm_config)
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(list(LAYERS), spec)]
        if self.window:
            shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
            windowed = SlidingWindowSpec(**shape, sliding_window=self.window)
            groups.insert(0, KVCacheGroupSpec(list(WINDOWED), windowed))
        if self.states:
            self.vllm_config.cache_config.mamba_cache_mode = "align"
            groups.insert(0, KVCacheGroupSpec(list(STATES), self._state_spec()))
        self.groups = [group.layer_names for group in groups]
        kv_config = KVCacheConfig(self.blocks, [], groups)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = prompt_scheduler(  # as every engine of a fleet that does not co-serve
            self.vllm_config, kv_config, StructuredOutputManager(self.vllm_config), BLOCK_TOKENS
        )
        self._note_counts()
        kind = KVConnectorFactory.get_connector_class(self.vllm_config.kv_transfer_config)
        self.worker: Any = kind(self.vllm_config, KVConnectorRole.WORKER, kv_config)
        # Groups share memory, as in vLLM: a block is one group's at a time.
        pages = [torch.zeros(self.blocks, BLOCK_TOKENS, dtype=torch.int64) for _ in LAYERS]
        self.kv = {layer: page for layers in self.groups for layer, page in zip(layers, pages, strict=True)}
        self.worker.register_kv_caches(self.kv)
        self.dispatcher = CudagraphDispatcher(self.vllm_config)
        self.dispatcher.initialize_cudagraph_keys(self.vllm_config.compilation_config.cudagraph_mode)

    def _note_counts(self) -> None:
        take = self.scheduler.connector.get_kv_connector_stats

        def noted() -> Any:
            stats = take()
            if isinstance(stats, ConnectorStats):
                self.counts.update(stats.reduce())
            return stats

        self.scheduler.connector.get_kv_connector_stats = noted

    def _state_spec(self) -> MambaSpec:
        return MambaSpec(
            block_size=BLOCK_TOKENS,
            shapes=((BLOCK_TOKENS,),),
            dtypes=(torch.int64,),
            mamba_cache_mode="align",
            num_prefill_checkpoint_blocks=int(self.inner_states),
            prefill_checkpoint_alignment=1 if self.inner_states else None,
        )

    def _kv_transfer_config(self) -> dict[str, Any]:
        ours = self.connector.to_kv_transfer_config()
        if self.beside is None:
            return ours
        return {
            "kv_connector": SEVERAL,
            "kv_connector_module_path": SEVERAL_MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [ours, dict(self.beside)]},
        }

    def side(self, plugin: str) -> Any:
        """Return the scheduler side of a plugin."""
        return self.scheduler.connector.scheduler_side(plugin)

    @property
    def kv_state(self) -> SharedKvState:
        connector = self.scheduler.connector
        ours: ConServeConnector = connector if isinstance(connector, ConServeConnector) else connector.ours
        return ours.kv_state

    def add(
        self,
        request_id: str,
        prompt: list[int],
        output: int,
        session: str | None = None,
        priority: int = 0,
        params: dict[str, Any] | None = None,
    ) -> None:
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0)
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id,
            list(prompt),
            sampling,
            None,
            priority=priority,
            session_id=session,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def prefetch(self, conversation: str, due_in_s: float = 60.0) -> bool:
        """Ask for a prefetch through the handler of the keeper's command; return whether it is accepted."""
        command = EngineCommand("prefetch", conversation, due_in_s=due_in_s)
        return bool(self.side("checkpoint").prefetches.ask(command).done)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def step(self) -> None:
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        self.worker.handle_preemptions(meta)
        mode = self._graph(output.num_scheduled_tokens)
        with set_forward_context(None, self.vllm_config, cudagraph_runtime_mode=mode):
            self.worker.bind_connector_metadata(meta)
            mode = get_forward_context().cudagraph_runtime_mode
        if output.total_num_scheduled_tokens:
            self.modes.append(mode)
        for source, target in output.kv_cache_block_copies or ():  # a hit on a part of a request's last block
            for layer in self.groups[0]:
                self.kv[layer][target] = self.kv[layer][source]
        self._hooked = mode != CUDAGraphMode.FULL
        sampled = self._forward(output.num_scheduled_tokens) if output.total_num_scheduled_tokens else {}
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        transfer = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )
        transfer.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        transfer.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        result = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: index for index, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=transfer,
        )
        requests = dict(self.scheduler.requests)
        self.scheduler.update_from_output(output, result)
        for request_id, request in requests.items():
            if request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
                self.answers[request_id] = list(request.output_token_ids)

    def _graph(self, scheduled: Mapping[str, int]) -> CUDAGraphMode:
        """Choose the graphs of a step as `GPUModelRunner._determine_batch_execution_and_padding` does."""
        if not scheduled:
            return CUDAGraphMode.NONE
        decodes = all(count == 1 for count in scheduled.values())
        mode, _ = self.dispatcher.dispatch(sum(scheduled.values()), uniform_decode=decodes)
        return mode

    def _forward(self, scheduled: Mapping[str, int]) -> dict[str, list[int]]:
        rows = {}
        for request_id, count in scheduled.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens  # including the tokens of this step
            tokens = list(request.all_token_ids)[:end]
            slots = [
                torch.tensor([ids[n // BLOCK_TOKENS] * BLOCK_TOKENS + n % BLOCK_TOKENS for n in range(end)])
                for ids in self.scheduler.kv_cache_manager.get_block_ids(request_id)
            ]
            rows[request_id] = slots, torch.tensor(history(tokens)), end - count
            self.computed_prompt_tokens += max(0, min(end, request.num_prompt_tokens) - (end - count))
        for group, layers in enumerate(self.groups):
            for number, layer in enumerate(layers):
                compute = self._state_layer if layer in STATES else self._layer
                compute(rows, group, 7 * group + number, layer)
        return {request_id: self._sample(request_id) for request_id in rows}

    def _layer(self, rows: Mapping[str, Row], group: int, number: int, layer: str) -> None:
        if self._hooked:
            self.worker.wait_for_layer_load(layer)
        cache = self.kv[layer].view(-1)
        for slots, right, start in rows.values():
            cache[slots[group][start:]] = right[start:] ^ number
        for request_id, (slots, right, start) in rows.items():
            first = max(0, start - self.window + 1) if layer in WINDOWED else 0
            bad = (cache[slots[group][first:]] != right[first:] ^ number).nonzero()
            if len(bad):
                self.wrong.append(f"{request_id}: {layer}, {len(bad)} tokens from {first + int(bad[0])}")
        if self._hooked:
            self.worker.save_kv_layer(layer, None, None)

    def _state_layer(self, rows: Mapping[str, Row], group: int, number: int, layer: str) -> None:
        """Compute a layer with states, for which vLLM calls no connector.

        A state that continues is first copied to the block in which the step ends.
        """
        pages = self.kv[layer]
        for request_id, (slots, right, start) in rows.items():
            before = slots[group][start - 1] // BLOCK_TOKENS
            if start and pages[before, 0] != right[start - 1] ^ number:
                self.wrong.append(f"{request_id}: {layer}, the state after {start} tokens")
            pages[slots[group][-1] // BLOCK_TOKENS] = right[-1] ^ number
            if inner := self._inner_end(start, len(right)):
                pages[slots[group][inner - 1] // BLOCK_TOKENS] = right[inner - 1] ^ number

    def _inner_end(self, start: int, end: int) -> int:
        """Return after how many tokens vLLM saves an additional state in a step, or 0 if it saves none."""
        offsets, _ = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=BLOCK_TOKENS,
            mamba_block_size=BLOCK_TOKENS,
            checkpoint_alignment=1 if self.inner_states else None,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=BLOCK_TOKENS,
        )
        return start + offsets[0] if offsets[0] else 0

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        whole = request.num_computed_tokens >= request.num_tokens
        return [next_token(list(request.all_token_ids))] if whole else []

    def run(self, steps: int = 5000) -> None:
        """Step until nothing is left to do."""
        import time

        for _ in range(steps):
            if not self.busy():
                return
            self.step()
            if not self.scheduler.running:
                time.sleep(0.0005)  # loads run in threads
        raise AssertionError(f"still busy after {steps} steps: {list(self.scheduler.requests)}")

    def under_way(self) -> str:
        """Describe which requests wait, and for what, when a test fails."""
        manager = self.scheduler.kv_cache_manager
        requests = [
            f"{r.status.name} {r.num_computed_tokens}/{r.num_tokens} tokens, "
            f"{len(manager.get_block_ids(r.request_id)[-1])} blocks"
            for r in (*self.scheduler.running, *self.scheduler.kv_holding_waiting, *self.scheduler.waiting)
        ]
        held = {name: len(list(ids())) for name, ids in self.kv_state.holders.references.items()}
        free = manager.block_pool.get_num_free_blocks()
        return f"{free} blocks free, held {held}, in vLLM's order {requests[:6]}"

    def faults(self) -> list[str]:
        return list(self.side("report").faults())

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
