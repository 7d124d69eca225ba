"""vLLM's engine core, scheduler and runner in one process, with a clock in place of the device.

The model has 36 layers and computes nothing. A step ends when its device would have finished it. The device
begins a step when the step is launched, or later when it has finished the step before.
"""

import functools
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.engines import write_model
from benchmarks.gpu.sizes import SMALL
from deploy.small_model import ModelShape
from kvtransfer.config import ConnectorConfig
from placement.scheduling.interface import ServingSettings, TurnTargets
from placement.scheduling.latency_model import LatencyModel
from workers.engine.coserving.config import (
    PROMPT_SCHEDULER,
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)

SHAPE = ModelShape(layers=36, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=64, max_context=4096)
PROMPT_TOKEN_S = 27e-6  # device time of a prompt token: 8,192 take 0.22 s on an H200
TBT_TARGET_S = 0.05  # target of turns beside offline prompts
BLOCKS = 2600
PROMPT, OFFLINE_PROMPT, OFFLINE_PROMPTS = 64, 2048, 4
SPIN_S = 2e-4  # a sleep is longer than asked for by about this time
UNSTEADY = 3  # first tokens of a round, not measured: the device was idle before the round
WAIT, PARTS = "wait", ("schedule", "prepare", "launch", "sample", "update", "other")


@dataclass(frozen=True)
class ClockedVariant:
    """Parts that an engine has, and the offline work beside its online requests."""

    coserves: bool = False
    keeps: bool = False  # whether it has what a decoder without co-serving has: host tier, prompt scheduler
    overlaps: bool = True  # whether scheduling is asynchronous
    offline_decodes: bool = False  # half of the requests are offline
    offline_prompts: bool = False


class PartTimes:
    """Wall time and CPU time of each part of a step in this thread, without the parts nested in it."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self._part, self._since = "", (0.0, 0.0)

    def enter(self, part: str) -> str:
        """Begin to measure a part of a step; return the part that was measured until now."""
        now, before = (time.perf_counter(), time.thread_time()), self._part
        self.wall[before] += now[0] - self._since[0]
        self.cpu[before] += now[1] - self._since[1]
        self._part, self._since = part, now
        return before

    def timed(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            before = self.enter(part)
            try:
                return original(*arguments, **named)
            finally:
                self.enter(before)

        return call


class DeviceClock:
    """Simulated device that takes a fixed time for each step, and more time for each prompt token."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.busy_until = self.busy_s = 0.0

    def launch(self, prompt_tokens: int) -> None:
        seconds = self.step_s + prompt_tokens * PROMPT_TOKEN_S
        self.busy_s += seconds
        self.busy_until = max(time.perf_counter(), self.busy_until) + seconds

    def wait(self, until: float) -> None:
        while (left := until - time.perf_counter()) > 0:
            time.sleep(max(left - SPIN_S, 0))


def replace_device(device: DeviceClock, parts: PartTimes) -> None:
    """Patch vLLM's CPU build in this process: the model computes nothing, and results wait for the clock."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from benchmarks.harness.cpu_overlap import replace_cuda
    from workers.engine.compat.coserving_runner import empty_hidden_states

    wait = parts.timed(WAIT, device.wait)

    class DeviceEvent:
        """Stands in for a CUDA event: completes when the step that was launched last is done."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._at = 0.0

        def record(self, stream: Any = None) -> None:
            self._at = device.busy_until

        def synchronize(self) -> None:
            wait(self._at)

    def forward(runner: Any, positions: Any) -> Any:
        device.launch(positions.shape[-1] - runner.input_batch.num_reqs)
        connector: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
        if connector is not None and connector._needs_layers:  # otherwise one graph without hooks
            for layer in runner.kv_cache_config.kv_cache_groups[0].layer_names:
                connector.wait_for_layer_load(layer)
                connector.save_kv_layer(layer, None, None)
        return empty_hidden_states(runner, positions)

    timed_forward = parts.timed("launch", forward)

    @functools.wraps(GPUModelRunner._model_forward)
    def model_forward(runner: Any, input_ids: Any = None, positions: Any = None, **_: Any) -> Any:
        return timed_forward(runner, positions)

    def to_list(runner: Any, sampled: Any) -> Any:
        wait(device.busy_until)
        return sampled.tolist()

    replace_cuda(DeviceEvent)
    GPUModelRunner._model_forward, CPUModelRunner._to_list = model_forward, to_list
    CPUModelRunner._zero_block_ids = lambda *_: None  # a GPU's runner launches one kernel for them


class ClockedEngine:
    """Engine of a variant in this process; `play` measures its decoding requests."""

    def __init__(self, variant: ClockedVariant, folder: Path, most: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from benchmarks.harness.cpu_overlap import overlapping
        from workers.engine.coserving.planned import PlannedScheduling

        self._variant, self._device, self._parts = variant, DeviceClock(), PartTimes()
        self._numbers = count()
        self._paused_s, self._paused_at = 0.0, 0.0
        self._turns: set[str] = set()
        self._prompts: set[str] = set()
        replace_device(self._device, self._parts)
        PlannedScheduling.clock = staticmethod(self._clock)
        write_model(folder / "model", replace(SMALL, model=SHAPE))
        with overlapping():
            config = EngineArgs(
                model=str(folder / "model"),
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype="bfloat16",
                block_size=32,
                max_model_len=4096,
                max_num_batched_tokens=8192,
                max_num_seqs=most + OFFLINE_PROMPTS,
                num_gpu_blocks_override=BLOCKS,
                kv_cache_memory_bytes=1 << 30,
                enforce_eager=True,
                async_scheduling=variant.overlaps,
                disable_log_stats=True,
                **own_parts(variant),
            ).create_engine_config()
            self._core = core = EngineCore(config, UniProcExecutor, log_stats=False)
        assert core.async_scheduling == variant.overlaps
        timed, scheduler, executor = self._parts.timed, core.scheduler, core.model_executor
        scheduler.schedule = timed("schedule", scheduler.schedule)
        scheduler.update_from_output = timed("update", scheduler.update_from_output)
        executor.execute_model = timed("prepare", executor.execute_model)
        executor.sample_tokens = timed("sample", executor.sample_tokens)

    def begin(self, requests: int, step_s: float) -> None:
        """Abort all requests of the engine, and start `requests` new ones that decode."""
        self._resume()
        self._core.abort_requests([*self._turns, *self._prompts])
        self._prompts = set()
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._core.step_fn()
        self._device.step_s = step_s
        offline = max(requests // 2, 1) if self._variant.offline_decodes else 0
        self._turns = {self._add(PROMPT, 3500) for _ in range(max(requests - offline, 1))}
        self._prompts = {self._add(PROMPT, 3500, offline=True) for _ in range(offline)}
        self.play(2 * UNSTEADY)

    def play(self, tokens: int) -> dict[str, Any]:
        """Run until every turn has generated `tokens` more tokens; return the times of each step in ms."""
        self._resume()
        gaps: list[float] = []
        rows: list[dict[str, float]] = []
        parts, last, device_s = self._parts, time.perf_counter(), 0.0
        missing = set(self._turns)
        parts.enter("other")
        while len(gaps) < tokens:
            while self._variant.offline_prompts and len(self._prompts) < OFFLINE_PROMPTS:
                self._prompts.add(self._add(OFFLINE_PROMPT, 1, offline=True))
            outputs, _ = self._core.step_fn()
            for to_client in (outputs or {}).values():
                for one in to_client.outputs:
                    missing.discard(one.request_id)
                    if one.finish_reason is not None:
                        self._prompts.discard(one.request_id)
            if missing:
                continue
            missing = set(self._turns)
            parts.enter("other")
            now = time.perf_counter()
            gaps.append(now - last)
            rows.append({**{f"{name}_cpu": s for name, s in parts.cpu.items()}, WAIT: parts.wall[WAIT]})
            if len(gaps) == UNSTEADY:
                device_s = self._device.busy_s
            last = now
            parts.wall.clear()
            parts.cpu.clear()
        parts.enter("")
        self._paused_at = time.monotonic()
        kept = rows[UNSTEADY:]
        host = [sum(one.get(f"{part}_cpu", 0.0) for part in PARTS) for one in kept]
        return {
            "gaps": [1e3 * gap for gap in gaps[UNSTEADY:]],
            "host": [1e3 * one for one in host],
            "device": 1e3 * (self._device.busy_s - device_s) / max(len(kept), 1),
            **{part: 1e3 * median(one.get(f"{part}_cpu", 0.0) for one in kept) for part in PARTS if kept},
            WAIT: 1e3 * median(one[WAIT] for one in kept) if kept else 0.0,
        }

    def _clock(self) -> float:
        """Return a time that stands still while other variants run; our schedulers use it as their clock."""
        return time.monotonic() - self._paused_s

    def _resume(self) -> None:
        if self._paused_at:
            self._paused_s += time.monotonic() - self._paused_at
            self._paused_at = 0.0

    def stop(self) -> None:
        self._core.scheduler.shutdown()

    def _add(self, prompt: int, output: int, offline: bool = False) -> str:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        number = next(self._numbers)
        request = EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=[(number * 7 + n * (1 + number % 5)) % 600 for n in range(prompt)],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=int(offline),
            session_id=None if offline else f"s{number}",
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        return str(request.request_id)


def own_parts(variant: ClockedVariant) -> dict[str, Any]:
    """Return vLLM's options for our connector, scheduler and worker; plain engines have none."""
    if not (variant.coserves or variant.keeps):
        return {}
    connector = ConnectorConfig(
        transfer=False,
        host_kv_gib=0.2,
        layer_hooks=variant.coserves,
        plugins=(SAFEPOINT_PLUGIN,) if variant.coserves else (),
        safepoint=f"conserve-overlap-{uuid.uuid4().hex[:8]}" if variant.coserves else "",
    )
    targets = TurnTargets(tbt_s=TBT_TARGET_S) if variant.offline_prompts else TurnTargets()
    serving = ServingSettings(slo=targets)
    model = LatencyModel(PROMPT_TOKEN_S, 0, 0, constant=5e-3)
    return {
        "kv_transfer_config": connector.to_kv_transfer_config(),
        "additional_config": CoServingConfig(serving, model, profiled=True).to_additional_config(),
        "scheduling_policy": "priority",
        **(
            {"scheduler_cls": SCHEDULER_CLASS, "worker_cls": WORKER_CLASS}
            if variant.coserves
            else {"scheduler_cls": PROMPT_SCHEDULER}
        ),
    }
