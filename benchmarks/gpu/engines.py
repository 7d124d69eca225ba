"""vLLM on this GPU with a model of real size and random weights: what ours costs beside plain vLLM, what the
host tier brings back, what a prefiller hands over, how soon offline work makes room.

Four engines of the same model start at once, each in processes of its own, and are measured in turns; then
one that co-serves with piecewise CUDA graphs for all steps, beside what ships. On a machine without CUDA they
are small, and show that the benchmark runs.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import secrets
import statistics
import tempfile
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kv.engine import KvEngine, counter
from benchmarks.kv.restore import leave_accelerator, restored_blocks
from benchmarks.output import quantile
from deploy.small_model import ModelShape, write_tokenizer
from kvtransfer.config import SECRET_VARIABLE, ConnectorConfig
from placement.iteration.interface import ServingSettings
from workers.coserving.config import (
    CPU_WORKER_CLASS,
    PROMPT_SCHEDULER,
    SAFEPOINT_PLUGIN,
    SCHEDULER_CLASS,
    WORKER_CLASS,
    CoServingConfig,
)
from workers.coserving.iterations import read_iterations
from workers.coserving.profile import on_cuda
from workers.processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
OFFLINE = 10  # a priority
LIMIT_S = 600.0
WARM = 16  # of an answer's tokens: the others' prompts may still be computed
SPARE = 320  # tokens below that are special somewhere


@dataclass(frozen=True)
class EngineSizes:
    model: ModelShape
    vocabulary: int
    prompts: tuple[int, ...]
    batches: tuple[int, ...]  # of answers
    prompt: int  # of those, and of online turns
    decoded: int
    offline: tuple[int, int]  # prompts, and their tokens
    online: int  # turns, one after the other
    host_kv_gib: float
    arguments: Mapping[str, Any]  # of vLLM


LARGE = EngineSizes(
    ModelShape(  # Qwen3 8B's
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, max_context=40_960
    ),
    vocabulary=151_936, prompts=(2048, 8192, 32_768), batches=(1, 16, 64), prompt=512, decoded=96,
    offline=(48, 6000), online=24, host_kv_gib=24.0,
    arguments={
        "dtype": "bfloat16", "max_model_len": 36_864, "max_num_batched_tokens": 8192, "max_num_seqs": 64,
        "gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 7 << 30,
    },
)  # fmt: skip
SMALL = EngineSizes(
    ModelShape(), vocabulary=640, prompts=(512,), batches=(1, 4), prompt=64, decoded=32,
    offline=(4, 400), online=4, host_kv_gib=0.2,
    arguments={
        "dtype": "float32", "max_model_len": 1024, "max_num_batched_tokens": 512, "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 28, "block_size": 32, "enforce_eager": True,
    },
)  # fmt: skip


@dataclass(frozen=True)
class EngineKind:
    """`plain`: vLLM as it comes."""

    name: str
    plain: bool = False
    keeps: bool = False  # KV on the host, and takes that of prompts from the one that prefills
    prefills: bool = False
    coserves: bool = False
    graphs: str = ""  # vLLM's `cudagraph_mode`; empty: what it chooses


TOGETHER = (
    EngineKind("plain", plain=True),
    EngineKind("kept", keeps=True),
    EngineKind("prefiller", prefills=True),
    EngineKind("coserving", coserves=True),
)
AFTERWARDS = (EngineKind("coserving-piecewise", coserves=True, graphs="PIECEWISE"),)  # memory is for four


def without_weights(directory: Path, sizes: EngineSizes) -> Path:
    """A model that vLLM fills with noise."""
    config = {**sizes.model.hugging_face_config(), "vocab_size": sizes.vocabulary}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, sizes.model.max_context)
    return directory


@dataclass(frozen=True)
class EngineRun:
    """What the engines' processes share."""

    sizes: EngineSizes
    folder: Path
    turn: Any  # a lock: whose turn it is to be measured
    prompts: Any  # a queue, of what the prefiller is asked for: prompt and transfer, or None
    port: int  # of the prefiller's transfers
    secret: str


@asynccontextmanager
async def started(kind: EngineKind, run: EngineRun) -> AsyncIterator[tuple[KvEngine, Path]]:
    """The engine, and the log of its iterations."""
    sizes, folder = run.sizes, run.folder
    os.environ.update(
        {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            SECRET_VARIABLE: run.secret,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        }
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "model": str(folder / "model"), "load_format": "dummy", "enable_prefix_caching": True,
        "scheduling_policy": "priority", **sizes.arguments,
    }  # fmt: skip
    log = folder / f"{kind.name}.iterations"
    if not kind.plain:
        settings = CoServingConfig(ServingSettings(), iteration_log=str(log))
        connector = ConnectorConfig(
            engine=kind.name, epoch=1, feed=str(folder / f"{kind.name}.sock"),
            transfer=kind.prefills or kind.keeps, port=run.port if kind.prefills else 0,
            host_kv_gib=sizes.host_kv_gib if kind.keeps else 0.0,
            layer_hooks=kind.coserves or kind.prefills, plugins=(SAFEPOINT_PLUGIN,) if kind.coserves else (),
            safepoint=f"conserve-gpu-{uuid.uuid4().hex[:8]}" if kind.coserves else "",
        )  # fmt: skip
        arguments |= {
            "kv_transfer_config": connector.to_kv_transfer_config(),
            "additional_config": settings.to_additional_config(),
            "scheduler_cls": SCHEDULER_CLASS if kind.coserves else PROMPT_SCHEDULER,
        }
    if kind.coserves:
        arguments |= {
            "worker_cls": WORKER_CLASS if on_cuda() else CPU_WORKER_CLASS,
            "async_scheduling": False,
        }
    if kind.graphs:
        arguments["compilation_config"] = {"cudagraph_mode": kind.graphs}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        yield KvEngine(llm), log
    finally:
        llm.shutdown()


def said(seed: int, tokens: int, sizes: EngineSizes) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(SPARE, sizes.vocabulary) for _ in range(tokens)]


async def tokens_and_prompts(engine: KvEngine, sizes: EngineSizes) -> dict[str, float]:
    """Seconds between tokens by number of answers, and to the first one by length of the prompt."""
    found: dict[str, float] = {}
    for count in sizes.batches:
        asked = (engine.ask(said(1000 * count + n, sizes.prompt, sizes), sizes.decoded) for n in range(count))
        answers = await asyncio.gather(*asked)
        gaps = [
            after - before
            for answer in answers
            for before, after in itertools.pairwise(answer.arrivals[WARM:])
        ]
        # Far from the mean where a few steps stood still, whatever each of the others cost.
        found[f"tbt_of_{count}_s"], found[f"tbt_p50_of_{count}_s"] = (
            statistics.mean(gaps),
            quantile(gaps, 0.5),
        )
    for length in sizes.prompts:
        times = [(await engine.ask(said(length + n, length, sizes), 1)).first_token_s for n in range(3)]
        found[f"ttft_of_{length}_s"] = statistics.median(times)
    return found


async def back_from_the_host(engine: KvEngine, sizes: EngineSizes) -> dict[str, float]:
    """A prompt whose KV is on the host only, against one that is computed."""
    found: dict[str, float] = {}
    for length in sizes.prompts:
        prompt, session = said(7 * length, length, sizes), f"l{length}"
        computed = (await engine.ask(prompt, 1, session)).first_token_s
        restored = []
        for _ in range(2):
            await leave_accelerator(engine)
            before = await restored_blocks(engine)
            restored.append((await engine.ask(prompt, 1, session)).first_token_s)
            found[f"restored_blocks_of_{length}"] = await restored_blocks(engine) - before
        found[f"restored_{length}_s"] = min(restored)
        found[f"restored_vs_computed_{length}"] = computed / min(restored)
    return found


async def handed_over(engine: KvEngine, run: EngineRun) -> dict[str, float]:
    """Seconds to the first token of a prompt that the prefiller computes: it is told, and the KV comes."""
    found: dict[str, float] = {}
    for length in run.sizes.prompts:
        taken = []
        for number in range(3):
            prompt, transfer = said(11 * length + number, length, run.sizes), uuid.uuid4().hex
            source = {
                "do_remote_prefill": True, "transfer_id": transfer, "remote_host": "127.0.0.1",
                "remote_port": run.port, "remote_epoch": 1,
            }  # fmt: skip
            run.prompts.put((prompt, transfer))
            taken.append((await engine.ask(prompt, 1, transfer=source)).first_token_s)
        found[f"handed_over_{length}_s"] = statistics.median(taken)
    refused = counter("conserve_kv_transfers_refused_total")
    return found | {"transfers_refused": refused}


async def prefill(engine: KvEngine, run: EngineRun) -> None:
    while (asked := await asyncio.to_thread(run.prompts.get, True, LIMIT_S)) is not None:
        prompt, transfer = asked
        await engine.ask(prompt, 1, transfer={"do_remote_decode": True, "transfer_id": transfer})


async def beside_offline_work(engine: KvEngine, sizes: EngineSizes, log: Path) -> dict[str, float]:
    """Short turns, alone and while offline prompts and answers take whatever is left."""

    async def turns(seed: int) -> tuple[list[float], list[float]]:
        first, gaps = [], []
        for number in range(sizes.online):
            answer = await engine.ask(said(seed + number, sizes.prompt, sizes), 24)
            first.append(answer.first_token_s)
            gaps += [after - before for before, after in itertools.pairwise(answer.arrivals)]
            await asyncio.sleep(0.02 + 0.08 * random.Random(seed + number).random())
        return first, gaps

    alone = await turns(50_000)
    before, began = len(read_iterations(log)), time.monotonic()
    count, length = sizes.offline
    prompts = [said(60_000 + n, length, sizes) for n in range(count)]
    offline = [asyncio.create_task(engine.ask(prompt, 64, priority=OFFLINE)) for prompt in prompts]
    await asyncio.sleep(1.0)
    beside = await turns(70_000)
    took = time.monotonic() - began
    done = read_iterations(log)[before:]
    for task in offline:
        task.cancel()
    await asyncio.gather(*offline, return_exceptions=True)
    aborted = [one for one in done if one.aborted]
    found = {
        "ttft_alone_p50_s": quantile(alone[0], 0.5), "ttft_beside_p50_s": quantile(beside[0], 0.5),
        "ttft_alone_p99_s": quantile(alone[0], 0.99), "ttft_beside_p99_s": quantile(beside[0], 0.99),
        "tbt_alone_p50_s": quantile(alone[1], 0.5), "tbt_beside_p50_s": quantile(beside[1], 0.5),
        "tbt_alone_p99_s": quantile(alone[1], 0.99), "tbt_beside_p99_s": quantile(beside[1], 0.99),
        "ttft_beside_vs_alone_p50": quantile(beside[0], 0.5) / quantile(alone[0], 0.5),
        "ttft_beside_vs_alone_p99": quantile(beside[0], 0.99) / quantile(alone[0], 0.99),
        "offline_tokens_per_s": sum(one.offline_tokens for one in done if not one.aborted) / took,
        "iterations": float(len(done)),
        "aborts": float(len(aborted)),
    }  # fmt: skip
    if aborted:
        found["signal_to_abort_p50_s"] = quantile([one.signal_to_abort_s for one in aborted], 0.5)
        found["signal_to_abort_p99_s"] = quantile([one.signal_to_abort_s for one in aborted], 0.99)
    return found


async def measured(kind: EngineKind, run: EngineRun) -> dict[str, float]:
    began, sizes = time.monotonic(), run.sizes
    async with started(kind, run) as (engine, log):
        await engine.ask(said(1, sizes.prompt, sizes), 20)
        found = {"start_s": time.monotonic() - began}
        if kind.prefills:
            await prefill(engine, run)
            return found
        with run.turn:
            found |= await tokens_and_prompts(engine, sizes)
            if kind.keeps:
                found |= await back_from_the_host(engine, sizes)
                try:
                    found |= await handed_over(engine, run)
                finally:
                    run.prompts.put(None)
            if kind.coserves:
                found |= await beside_offline_work(engine, sizes, log)
        return found


def _measured(kind: EngineKind, run: EngineRun) -> dict[str, Any]:
    try:
        return asyncio.run(measured(kind, run))
    except Exception as error:  # noqa: BLE001  the others' figures are worth having
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def measure_engines(device: str) -> dict[str, dict[str, Any]]:
    sizes = LARGE if device == "cuda" else SMALL
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        without_weights(folder / "model", sizes)
        found: dict[str, dict[str, Any]] = {}
        for kinds in (TOGETHER, AFTERWARDS):
            with ProcessPoolExecutor(len(kinds), spawn) as processes, spawn.Manager() as manager:
                port, secret = free_port("127.0.0.1"), secrets.token_hex(16)
                run = EngineRun(sizes, folder, manager.Lock(), manager.Queue(), port, secret)
                running = {kind.name: processes.submit(_measured, kind, run) for kind in kinds}
                found |= {name: one.result() for name, one in running.items()}
    plain = found["plain"]
    for name in ("kept", "coserving", "coserving-piecewise"):
        for figure, value in plain.items():
            if figure.startswith(("tbt", "ttft")) and figure in found[name]:
                found[name][f"{figure.removesuffix('_s')}_vs_plain"] = found[name][figure] / value
    for figure, value in list(found["kept"].items()):
        if figure.startswith("handed_over"):
            alone = plain[f"ttft_of_{figure.removeprefix('handed_over_')}"]
            found["kept"][f"{figure.removesuffix('_s')}_vs_plain"] = value / alone
    return found
