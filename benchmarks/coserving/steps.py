"""Host time of a step in which requests decode: vLLM's scheduler alone, and with ours in it, without a model.

    python -m benchmarks.coserving.steps [--quick] [--json FILE]

vLLM's scheduler and both sides of our connector are real; tokens are made up, and 36 layers call the hooks
before and after each. Contexts are 600 to 4,000 tokens. Figures are medians in microseconds, one kind of
scheduler after the other; compare them within a run.
"""

import os
import random
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu.engines import write_model
from benchmarks.gpu.sizes import SMALL
from benchmarks.harness.output import command, write_json
from kvtransfer.config import ConnectorConfig
from placement.scheduling.interface import ServingSettings
from workers.coserving.config import PROMPT_SCHEDULER, SAFEPOINT_PLUGIN, SCHEDULER_CLASS, CoServingConfig

KINDS = ("plain", "prompts", "coserving")
BATCHES = (1, 16, 64)
CONTEXTS = 600, 4000
BLOCK, BLOCKS, BATCHED = 16, 20_000, 8192
LAYERS = [f"layer{number}" for number in range(36)]
WARM = 30  # steps
Result = TypeVar("Result")


class HostSteps:
    """Scheduler of an engine, with the connector's worker side unless it is plain vLLM."""

    def __init__(self, kind: str, folder: Path) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=str(folder / "model"),
            dtype="float32",
            max_model_len=BATCHED,
            block_size=BLOCK,
            max_num_seqs=max(BATCHES),
            num_gpu_blocks_override=BLOCKS,
            max_num_batched_tokens=BATCHED,
            enforce_eager=True,
            async_scheduling=False,
            scheduling_policy="priority",
            **self._ours(kind, folder),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(LAYERS, spec)])
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        make = config.scheduler_config.get_scheduler_cls()
        self.scheduler: Any = make(config, cache, StructuredOutputManager(config), BLOCK, log_stats=True)
        self.worker: Any = None
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        if kind != "plain":
            from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

            from kvtransfer.connector import ConServeConnector

            self.worker = ConServeConnector(config, KVConnectorRole.WORKER, cache)
            self.worker.register_kv_caches({layer: torch.zeros(BLOCKS, BLOCK) for layer in LAYERS})

    def _ours(self, kind: str, folder: Path) -> dict[str, Any]:
        if kind == "plain":
            return {}
        coserves = kind == "coserving"
        connector = ConnectorConfig(
            transfer=False,
            feed=str(folder / f"{kind}.sock"),
            layer_hooks=coserves,
            plugins=(SAFEPOINT_PLUGIN,) if coserves else (),
            safepoint=f"conserve-steps-{uuid.uuid4().hex[:8]}" if coserves else "",
        )
        settings = CoServingConfig(ServingSettings(), iteration_log=str(folder / f"{kind}.iterations"))
        return {
            "kv_transfer_config": connector.to_kv_transfer_config(),
            "additional_config": settings.to_additional_config(),
            "scheduler_cls": SCHEDULER_CLASS if coserves else PROMPT_SCHEDULER,
        }

    def ask(self, key: str, tokens: int, rng: random.Random) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0.0, max_tokens=BATCHED - tokens, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        prompt = [rng.randrange(600) for _ in range(tokens)]
        request = Request(key, prompt, params, None, arrival_time=time.time(), block_hasher=self._hasher)
        self.scheduler.add_request(request)

    def step(self) -> int:
        """Run one step and return how many requests had one token in it."""
        from vllm.v1.outputs import ModelRunnerOutput

        done = self._timed("schedule", self.scheduler.schedule)
        of_workers = self._timed("workers", self._work, done) if self.worker is not None else None
        keys = list(done.num_scheduled_tokens)
        requests = [self.scheduler.requests[key] for key in keys]
        tokens = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        rows = {key: row for row, key in enumerate(keys)}
        result = ModelRunnerOutput(keys, rows, tokens, kv_connector_output=of_workers)
        self._timed("update", self.scheduler.update_from_output, done, result)
        return sum(count == 1 for count in done.num_scheduled_tokens.values())

    def _timed(self, part: str, work: Callable[..., Result], *args: Any) -> Result:
        began = time.perf_counter()
        result = work(*args)
        self.seconds[part].append(time.perf_counter() - began)
        return result

    def _work(self, done: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        worker = self.worker
        worker.bind_connector_metadata(done.kv_connector_metadata)
        worker.handle_preemptions(done.kv_connector_metadata)
        for layer in LAYERS:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, None, None)
        worker.wait_for_save()
        ended = worker.get_transfer_results(done.finished_req_ids)
        output = KVConnectorOutput(finished_recving=ended.finished_recving)
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return output

    def of_batch(self, count: int, steps: int) -> dict[str, float]:
        """Return the microseconds of each part of a step in which `count` requests decode."""
        from vllm.v1.request import RequestStatus

        rng, (least, most) = random.Random(count), CONTEXTS
        keys = [f"{count}-{number}" for number in range(count)]
        for number, key in enumerate(keys):
            self.ask(key, least + (most - least) * number // max(count - 1, 1), rng)
        while self.step() < count:
            pass
        for _ in range(WARM):
            self.step()
        self.seconds.clear()
        for _ in range(steps):
            self.step()
        found = {part: 1e6 * statistics.median(seconds) for part, seconds in self.seconds.items()}
        self.scheduler.finish_requests(keys, RequestStatus.FINISHED_ABORTED)
        self.step()
        return {**found, "step": sum(found.values())}

    def close(self) -> None:
        self.scheduler.shutdown()
        if self.worker is not None:
            self.worker.shutdown()


def host_time(kind: str, batches: tuple[int, ...], steps: int) -> dict[int, dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name) / "model", SMALL)
        engine = HostSteps(kind, Path(name))
        try:
            return {count: engine.of_batch(count, steps) for count in batches}
        finally:
            engine.close()


def main() -> None:
    parser = command(__doc__, quick="a few steps of 1 and 4 requests")
    args = parser.parse_args()
    os.environ.update({"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    batches, steps = ((1, 4), 20) if args.quick else (BATCHES, 400)
    found = {kind: host_time(kind, batches, steps) for kind in KINDS}
    print("| scheduler | requests | schedule | workers | update | step | beyond vLLM's |")
    print("|---" * 7 + "|")
    for kind, by_count in found.items():
        for count, parts in by_count.items():
            figures = [parts.get(part, 0.0) for part in ("schedule", "workers", "update", "step")]
            figures.append(parts["step"] - found["plain"][count]["step"])
            print(f"| {kind} | {count} | {' | '.join(f'{one:.0f}' for one in figures)} |")
    write_json(args.json, found)


if __name__ == "__main__":
    main()
